package layer

// Keys of a layer in a blob store, see docs/formats/layer.md. The manifest is
// written last and read first: where it is, all is.

// ManifestKey is where the manifest of a layer is.
func ManifestKey(d Digest) string { return "manifests/" + d.Hex() }

// MetaKey is where metadata of that digest are.
func MetaKey(d Digest) string { return "meta/" + d.Hex() }

// IndexKey is where the index of data with that table of chunks is.
func IndexKey(d Digest) string { return "indexes/" + d.Hex() }

// PackKey is where a pack is.
func PackKey(d Digest) string { return "packs/" + d.Hex() }

// HintKey is where it says which index has a chunk.
func HintKey(d Digest) string { return "hints/" + d.Hex() }

// LineageKey is where the lineage of a packed layer is. It is no part of the
// layer: it may be missing, and of layers with the same bytes it is that of the
// first.
func LineageKey(d Digest) string { return "lineages/" + d.Hex() }

// TraceKey is where the access trace of a layer is.
func TraceKey(d Digest) string { return "traces/" + d.Hex() }
