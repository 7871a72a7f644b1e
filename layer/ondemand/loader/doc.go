// Package loader is the process that brings the data of layers as they are
// read, and the client by which the node agent uses it.
//
// A Server has no privilege but the descriptors it is handed: for each layer the
// sparse data file, the note of what is here, the chunk index, and for each
// mount of it the /dev/fuse descriptor and journal of package fuse. It opens no
// file, and nobody but the agent can speak to it: the listening socket is made by
// who started it.
//
// It may be killed at any moment. The descriptors of mounts are kept by a Keeper
// that does not end (the hold); a Client hands everything to the next loader,
// and reads that wait go on. A Server whose agent is gone serves on. Reads are
// answered with an error when they cannot be served within the deadline, and
// whenever the Keeper is gone too. Before a reader is told of an error the agent has
// noted who may be one (Config.Failed); without an agent it is told after a while.
//
// The protocol is docs/formats/loader.md.
package loader
