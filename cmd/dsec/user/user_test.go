package user

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/contexts"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

func TestEveryVerbHasAnExampleOfItself(t *testing.T) {
	var walk func(c *cobra.Command, path string)
	walk = func(c *cobra.Command, path string) {
		path += " " + c.Name()
		if c.Short == "" || !strings.Contains(c.Example, strings.TrimSpace(path)) {
			t.Errorf("%s: short text %q, example %q", path, c.Short, c.Example)
		}
		if c.RunE != nil && c.ValidArgsFunction == nil {
			t.Errorf("%s completes nothing", path)
		}
		for _, sub := range c.Commands() {
			walk(sub, path)
		}
	}
	for _, v := range Verbs {
		walk(v(), "dsec")
	}
}

func TestGroupsSayWhatTheyAreAbout(t *testing.T) {
	for _, c := range []*cobra.Command{Image(), Layer(), Template()} {
		if n := strings.Count(c.Long, "\n"); n < 1 || n > 4 || !strings.Contains(c.Long, c.Name()+" is ") {
			t.Errorf("%s: %q", c.Name(), c.Long)
		}
	}
	for _, kind := range []string{"image", "layer", "disk", "template"} {
		if !strings.Contains(Layer().Long, kind) {
			t.Errorf("layer says nothing of kind %s", kind)
		}
	}
}

func env(m map[string]string) func(string) string { return func(k string) string { return m[k] } }

func TestTheGatewayIsFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.json")
	f := contexts.File{Current: "here", Contexts: map[string]contexts.Context{
		"here": {Socket: "/run/x.sock", APIKey: "k1"}, "far": {URL: "https://far", APIKey: "k2"}}}
	if err := f.Save(path); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		env  map[string]string
		url  string
		key  string
	}{
		{"", nil, "unix:///run/x.sock", "k1"},
		{"far", nil, "https://far", "k2"},
		{"", map[string]string{"DSEC_CONTEXT": "far"}, "https://far", "k2"},
		{"", map[string]string{"DSEC_CONTEXT": "far", "DSEC_API_KEY": "k3"}, "https://far", "k3"},
		{"", map[string]string{"DSEC_URL": "http://u", "DSEC_API_KEY": "k4", "DSEC_CONTEXT": "far"}, "http://u", "k4"},
		{"here", map[string]string{"DSEC_URL": "http://u"}, "unix:///run/x.sock", "k1"},
		{"", map[string]string{"DSEC_SOCKET": "/s"}, "unix:///s", ""},
	} {
		if c.env == nil {
			c.env = map[string]string{}
		}
		c.env["DSEC_CONFIG"] = path
		cfg, err := endpoint(c.name, env(c.env))
		if err != nil || cfg.URL != c.url || cfg.Key != c.key {
			t.Errorf("%q %v: %+v, %v", c.name, c.env, cfg, err)
		}
	}
	if _, err := endpoint("none", env(map[string]string{"DSEC_CONFIG": path})); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("unknown context: %v", err)
	}
}

func TestJSONHasSecondsBytesAndSnakeCase(t *testing.T) {
	var b bytes.Buffer
	err := printJSON(&b, sampled{"s1", runtime.Stats{CPU: 1500 * time.Millisecond, OOMKills: 2, MemoryPeak: 1 << 40}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"cpu":1.5`, `"oom_kills":2`, `"memory_peak":1099511627776`, `"sandbox":"s1"`} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s lacks %s", b.String(), want)
		}
	}
	b.Reset()
	if err := printJSON(&b, ran{Stdout: []byte("a<b>"), Output: map[string]int64{"stdout": 4}}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), `"stdout":"a<b>"`) {
		t.Error(b.String())
	}
}

func TestTablesAreAlignedAndClean(t *testing.T) {
	var b bytes.Buffer
	if err := table(&b, "ID NAME", [][]string{{"long-identifier", "evil\x1b[2J"}, {"x", ""}}); err != nil {
		t.Fatal(err)
	}
	if want := "ID               NAME\nlong-identifier  evil?[2J\nx                -\n"; b.String() != want {
		t.Errorf("%q", b.String())
	}
}

func TestImagesWithoutAConfigAreListed(t *testing.T) {
	c := &cobra.Command{}
	var b bytes.Buffer
	c.SetOut(&b)
	list := []client.Layer{
		{Info: layer.Info{Digest: "sha256:1", Image: true, Config: &image.Config{}}, Tags: []string{"oci:1"}},
		{Info: layer.Info{Digest: "sha256:2", Image: true}, Tags: []string{"rootfs:1"}},
		{Info: layer.Info{Digest: "sha256:3"}, Tags: []string{"repo:1"}},
	}
	if err := showLayers(c, list, "KIND", kind); err != nil {
		t.Fatal(err)
	}
	if err := showLayers(c, imagesOf(list), "CONFIG", configured); err != nil {
		t.Fatal(err)
	}
	want := [][]string{{"oci:1", "image"}, {"rootfs:1", "image"}, {"repo:1", "layer"}, {"oci:1", "yes"}, {"rootfs:1", "none"}}
	var got [][]string
	for _, line := range strings.Split(b.String(), "\n") {
		if f := strings.Fields(line); len(f) > 0 && f[0] != "TAGS" {
			got = append(got, []string{f[0], f[5]}) // a size is two words
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v\n%s", got, want, b.String())
	}
}

func TestSidesOfACopy(t *testing.T) {
	for arg, want := range map[string][2]string{
		"work:/src": {"work", "/src"}, "./a:b": {"", "./a:b"}, "/a:b": {"", "/a:b"}, "file": {"", "file"}, "-": {"", "-"}, "x:": {"x", ""},
	} {
		if box, p := side(arg); box != want[0] || p != want[1] {
			t.Errorf("%s: %q, %q", arg, box, p)
		}
	}
	for arg, want := range map[string][2]uint16{"80": {80, 80}, "8080:80": {8080, 80}, "0:80": {0, 80}} {
		if l, p, err := ports(arg); err != nil || l != want[0] || p != want[1] {
			t.Errorf("%s: %d, %d, %v", arg, l, p, err)
		}
	}
	for _, bad := range []string{"", "0", "x", "1:2:3", "70000", ":80"} {
		if _, _, err := ports(bad); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestSpecsAreReadFromFlags(t *testing.T) {
	var s specFlags
	c := &cobra.Command{Use: "x"}
	s.register(c)
	err := c.ParseFlags(strings.Fields("--memory 2GiB --cpu 1.5 -e A=b=c -l x=y --layer one --layer two --mount /a:/b --network open --idle 10m"))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := s.build("img")
	want := dsec.Spec{Tier: dsec.TierContainer, Image: "img", Layers: []dsec.LayerRef{"one", "two"}, Env: map[string]string{"A": "b=c"},
		Labels: map[string]string{"x": "y"}, Network: dsec.NetworkOpen, Mounts: []dsec.HostMount{{Source: "/a", Target: "/b"}},
		Limits: dsec.Limits{CPU: 1.5, Memory: 2 << 30}, Lifetimes: dsec.Lifetimes{Idle: 10 * time.Minute}}
	if err != nil || !reflect.DeepEqual(spec, want) {
		t.Errorf("%+v, %v", spec, err)
	}
	if err := c.ParseFlags([]string{"--memory", "lots"}); err == nil {
		t.Error("took a size of lots")
	}
	s.env = []string{"novalue"}
	if _, err := s.build("img"); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("env without value: %v", err)
	}
}

func TestWhyFitsOnAPage(t *testing.T) {
	r := dsec.NewResult(dsec.CauseOOM, "run", dsec.InducedBySelf, "memory.max 64 MiB, peak 64 MiB, oom_kill 1")
	r.Usage = dsec.Usage{MemoryPeak: 64 << 20, CPU: time.Second, Wall: time.Minute, ExecsStarted: 9}
	told := told{Sandbox: client.Sandbox{ID: "s1", State: dsec.Failed, Result: r, Changed: time.Now(), Created: time.Now(),
		Spec: dsec.Spec{Name: "work", Image: "img", Layers: []dsec.LayerRef{"repo"}, Limits: dsec.Limits{Memory: 64 << 20, CPU: 1}}}}
	for i := range 9 {
		id := "e" + string(rune('0'+i))
		told.Events = append(told.Events, dsec.Event{Type: dsec.EventExecStarted, Exec: id, Detail: "make \x1b[31mtest"},
			dsec.Event{Type: dsec.EventExecExited, Exec: id, Detail: string(process.Exited), Fields: map[string]string{"exit_code": "2"}})
	}
	told.Ends = map[string]process.Result{"e7": {Status: process.Exited, ExitCode: 3, OOM: true, OOMLimit: 64 << 20, Wall: time.Second}}
	told.Events = append(told.Events, dsec.Event{Type: dsec.EventOOM, Detail: "killed python3"})
	var b bytes.Buffer
	if err := told.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"agent: oom in phase \"run\", induced by self", "drop from the loss: false", "oom_kill 1", "peak 64.0 MiB of 64.0 MiB",
		"e8", "exited 3, out of memory at 64.0 MiB, 1s, 0 B of output", "make ?[31mtest → exited exit_code=2", "killed python3"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("lacks %q:\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "e2 ") || strings.Count(b.String(), "\n") > 40 {
		t.Errorf("too long:\n%s", b.String())
	}
}

func TestWhySaysWhatItWillEndAs(t *testing.T) {
	sb := client.Sandbox{ID: "s1", State: dsec.Running, Created: time.Now(), Changed: time.Now(),
		Blame: &dsec.Blame{Cause: dsec.CauseInfraImage, Since: time.Now(), Evidence: []string{"layer sha256:00: connection refused"}}}
	told := told{Sandbox: sb, Mask: masked(sb), Ends: map[string]process.Result{"e1": {Status: process.Exited, ExitCode: 1, Blame: dsec.CauseInfraImage}},
		Events: []dsec.Event{{Type: dsec.EventExecStarted, Exec: "e1"}, {Type: dsec.EventExecExited, Exec: "e1"}}}
	var b bytes.Buffer
	if err := told.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"infra_image, which it is blamed on since", "drop from the loss: true", "connection refused", "exited 1, blamed on infra_image"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("lacks %q:\n%s", want, b.String())
		}
	}
	if got := cause(sb); got != "(infra_image)" {
		t.Errorf("ps: %q", got)
	}
}

func TestProgressIsSilentWithoutATerminalForAMoment(t *testing.T) {
	var b bytes.Buffer
	c := &cobra.Command{}
	c.SetErr(&b)
	p := newBar(c, "copy", 100, size)
	p.add(50)
	p.spoken = time.Now().Add(-plainEvery)
	p.add(10)
	p.done()
	if b.String() != "copy: 60 B of 100 B\n" {
		t.Errorf("%q", b.String())
	}
}

func TestSpans(t *testing.T) {
	for d, want := range map[time.Duration]string{-1: "0s", 12 * time.Millisecond: "12ms", 90 * time.Second: "1m", 50 * time.Hour: "2d"} {
		if got := span(d); got != want {
			t.Errorf("%d: %s", d, got)
		}
	}
}

func TestAdviceForAServerThatIsNotThere(t *testing.T) {
	_, gone := net.Dial("unix", filepath.Join(t.TempDir(), "none.sock"))
	if got := Advice(dsec.E(dsec.Unavailable, "list sandboxes", "", gone)); !strings.Contains(got, "sudo dsec up") {
		t.Errorf("%v: %q", gone, got)
	}
	refused := &net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.EACCES)}
	if got := Advice(dsec.E(dsec.PermissionDenied, "list sandboxes", "", refused)); !strings.Contains(got, "sudo") {
		t.Errorf("%q", got)
	}
	if got := Advice(dsec.E(dsec.NotFound, "find sandbox", "x", nil)); got != "" {
		t.Errorf("%q", got)
	}
}
