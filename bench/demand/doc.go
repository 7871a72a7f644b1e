// Package demand measures layers on demand against a real S3 server that takes
// 20 ms before each answer. Every machine is a real `dsec up` that knows no layer,
// on a file system of its own, whose device counts what is written.
//
//   - TestDemand/burst: many sandboxes at once over many environments, on demand, beside
//     layers that are fetched whole first, archives that are pulled and unpacked for
//     runc, and everything being there.
//   - TestDemand/alone: each environment alone, with and without a trace.
//   - TestDemand/mounts: memory and speed of a mount that has a loader in its path.
//   - TestDemand/never: images by their references, beside pulling and unpacking them.
//
// DSEC_DEMAND_IMAGES is the directory of the tars that bench/images/build.sh
// makes; without it nothing is measured. DSEC_DEMAND_N is the number of sandboxes
// (default 48), DSEC_DEMAND_ROUNDS of rounds (default 1), DSEC_DEMAND_BANDWIDTH
// the MiB a second of the S3 server (default no limit), DSEC_DEMAND_PLOTS where
// plots go, DSEC_DEMAND_HOW the mechanism (default fuse), DSEC_DEMAND_LAYER the
// root whose mounts are measured (default web), DSEC_DEMAND_LIVE how many live
// sandboxes have them (default 1000). It needs root.
package demand
