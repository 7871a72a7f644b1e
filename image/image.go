// Package image turns what people have (an OCI reference, layout or archive, a
// root file system tar, a directory) into layers: pairs of an EROFS metadata
// file and a data file, named by the digest of their content.
package image

// Config is what an image says about running it. It comes from the outside:
// nothing in it is trusted to exist.
type Config struct {
	Env        []string `json:"env,omitempty"` // "KEY=value"
	User       string   `json:"user,omitempty"`
	Workdir    string   `json:"workdir,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Arch       string   `json:"arch,omitempty"` // GOARCH
	StopSignal string   `json:"stop_signal,omitempty"`
}
