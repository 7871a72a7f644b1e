package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestSampleFileIsTheDefaults(t *testing.T) {
	const sample = "../../deploy/dsec.yaml"
	c, err := Load(sample, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	d := Default()
	// YAML has empty lists where Go has nil.
	d.Node.MountRoots, d.Node.DenyNets, d.Node.Nameservers = []string{}, []string{}, []string{}
	if !reflect.DeepEqual(c, d) {
		t.Errorf("sample\n%+v\ndefaults\n%+v", c, d)
	}
	text, _ := os.ReadFile(sample)
	for _, typ := range []reflect.Type{reflect.TypeOf(c), reflect.TypeOf(c.Node), reflect.TypeOf(c.Gateway)} {
		for i := range typ.NumField() {
			if name := typ.Field(i).Tag.Get("yaml"); !strings.Contains(string(text), name+":") {
				t.Errorf("the sample does not mention %s", name)
			}
		}
	}
}

func TestUnknownFieldIsRefused(t *testing.T) {
	p := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(p, []byte("node: {max_lives: 9}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(p, true); err == nil || !strings.Contains(err.Error(), "max_lives") {
		t.Errorf("got %v", err)
	}
}

func TestWrongValuesNameTheirField(t *testing.T) {
	for field, spoil := range map[string]func(*Config){
		"instance":            func(c *Config) { c.Instance = "a/b" },
		"data":                func(c *Config) { c.Data = "here" },
		"blobs":               func(c *Config) { c.Blobs = "/srv/blobs" },
		"node.uid_base":       func(c *Config) { c.Node.UIDBase = 1000 },
		"node.max_live":       func(c *Config) { c.Node.MaxLive = 0 },
		"node.uid_ranges":     func(c *Config) { c.Node.UIDRanges = 1 },
		"node.open_conns":     func(c *Config) { c.Node.OpenConns = 0 },
		"node.port_conns":     func(c *Config) { c.Node.PortConns = 0 },
		"node.subnet":         func(c *Config) { c.Node.Subnet = "10.0.0.0" },
		"node.disk_pool":      func(c *Config) { c.Node.DiskPool = "many" },
		"node.id":             func(c *Config) { c.Node.ID = "A-1" },
		"gateway.listen":      func(c *Config) { c.Gateway.Listen = "0.0.0.0:80" },
		"gateway.uid":         func(c *Config) { c.Gateway.UID = 0 },
		"node.record_bytes":   func(c *Config) { c.Node.RecordBytes = "1XB" },
		"node.layer_cache":    func(c *Config) { c.Node.LayerCache = "much" },
		"node.on_demand":      func(c *Config) { c.Node.OnDemand = "yes" },
		"node.packages.uid":   func(c *Config) { c.Node.Packages.UID = c.Node.LoaderUID },
		"node.packages.cache": func(c *Config) { c.Node.Packages.Cache = "big" },
		"node.packages.npm":   func(c *Config) { c.Node.Packages.NPM = "https://user:secret@registry" },
		"node.loader_uid":     func(c *Config) { c.Node.LoaderUID = 0 },
		"node.egress_uid":     func(c *Config) { c.Node.EgressUID = c.Node.LoaderUID },
	} {
		c := Default()
		spoil(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got %v", field, err)
		}
	}
}

func TestBytes(t *testing.T) {
	for in, want := range map[string]int64{"4096": 4096, "1KiB": 1024, "1.5GiB": 3 << 29, "50%": 100} {
		if got, err := Bytes(in, 200); err != nil || got != want {
			t.Errorf("%s: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "x", "-1", "1GB", "nan", "1e300TiB", "10EiB", "7E", ".", "1..2", "0x10", "1e3", "inf", "99999999999TiB"} {
		if got, err := Bytes(in, 200); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
}

func TestTooFewRangesSayHowManyWork(t *testing.T) {
	c := Default()
	c.Node.UIDRanges = 1000
	err := c.Validate()
	for _, want := range []string{"node.uid_ranges: 1000, want at least 4016", "node.max_live", "node.shells"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
	c.Node.UIDRanges = 4016
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}
