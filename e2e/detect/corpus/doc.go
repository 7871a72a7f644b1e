// Package corpus has what detectors are measured with: programs that cheat, one per
// file in testdata/hacks with a header that says what it does and where the idea is
// from, and honest rollouts, which are made from a seed.
//
// A rollout is a list of commands of an agent that works on one of three small
// repositories. The same seed gives the same rollout. A hack is embedded in an honest
// rollout: before, among or after its commands.
//
// What detectors were tuned with is told apart from what they were measured with: see Set.
package corpus
