package store

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/opendsec/dsec/image"
)

// overlayConfig puts what an upper layer says over what those below said:
// variables by name, the rest if it is there.
func overlayConfig(base image.Config, up *image.Config) image.Config {
	if up == nil {
		return base
	}
	out := base
	out.Env = overlayEnv(base.Env, up.Env)
	if up.User != "" {
		out.User = up.User
	}
	if up.Workdir != "" {
		out.Workdir = up.Workdir
	}
	if up.Entrypoint != nil || up.Cmd != nil {
		out.Entrypoint, out.Cmd = up.Entrypoint, up.Cmd
	}
	if up.Arch != "" {
		out.Arch = up.Arch
	}
	if up.StopSignal != "" {
		out.StopSignal = up.StopSignal
	}
	return out
}

func overlayEnv(base, up []string) []string {
	out := slices.Clone(base)
	for _, kv := range up {
		name, _, _ := strings.Cut(kv, "=")
		i := slices.IndexFunc(out, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		if i < 0 {
			out = append(out, kv)
			continue
		}
		out[i] = kv
	}
	return out
}

// normal is the config as it will be read back: JSON holds no broken UTF-8.
func normal(c *image.Config) (*image.Config, error) {
	if c == nil {
		return nil, nil
	}
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	out := &image.Config{}
	return out, json.Unmarshal(b, out)
}
