// Package audit keeps the evidence of what happened in sandboxes.
//
// # Logs
//
// A Store has a log for each sandbox, of a bounded size, on the node's disk, out of
// reach of every sandbox. A log has two lanes, one of started programs and one of all
// else, so that no flood of the one pushes out the other. Of each lane the beginning
// is kept for ever and the newest for as long as there is room; what is dropped
// between them shows as a record of kind lost. Records that say the same are written
// one by one at first and then once a second, with a Count. The format is in
// docs/formats/audit.md.
//
// Append never blocks on readers. What was appended survives the end of this process,
// not a loss of power: nothing is synced.
//
// # Witnesses
//
// A Witness sees what sandboxes do without anything of ours inside them, and appends
// to the Store. What it could not see it says with records of kind lost.
//
// # Watched paths
//
// A Watchlist says of which paths a write is evidence; patterns have elements as
// path.Match has them, and "**" for any number of elements.
//
// All types may be used concurrently. Errors are *dsec.Error.
package audit
