package boot

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian/debiantest"
	"github.com/opendsec/dsec/internal/linux"
)

// warnings collects what is said loudly while a test runs.
func warnings(t *testing.T) *bytes.Buffer {
	var b bytes.Buffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelWarn})))
	t.Cleanup(func() { slog.SetDefault(old) })
	return &b
}

func build(t *testing.T, cfg Config) Kernel {
	t.Helper()
	k, err := Build(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func bytesOf(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBuildsThePinnedKernel(t *testing.T) {
	a, cfg := world(t)
	said := warnings(t)
	k := build(t, cfg)
	if !k.Pinned || k.Release != release || k.Lock != cfg.Lock || strings.Join(k.Modules, " ") != "virtio virtio_ring virtio_pci" {
		t.Errorf("%+v", k)
	}
	if !bytes.Equal(bytesOf(t, k.Image), fakeVmlinux(t, release)) {
		t.Error("the image is not the kernel")
	}
	if said.Len() != 0 {
		t.Errorf("said: %s", said)
	}
	// All is there: nobody is asked, and nothing is written.
	a.Asked()
	before := bytesOf(t, k.Initramfs)
	again := build(t, cfg)
	if again.Initramfs != k.Initramfs || again.Image != k.Image || len(a.Asked()) != 0 {
		t.Errorf("%+v, then %+v", k, again)
	}
	// Another cache, the same bytes under the same name.
	cfg.Cache = t.TempDir()
	other := build(t, cfg)
	if filepath.Base(other.Initramfs) != filepath.Base(k.Initramfs) || !bytes.Equal(bytesOf(t, other.Initramfs), before) {
		t.Error("the same inputs made other bytes")
	}
}

// Each input has a part in the name.
func TestOtherInputsHaveAnotherName(t *testing.T) {
	_, cfg := world(t)
	seen := map[string]string{}
	for name, change := range map[string]func(c *Config){
		"as it is":      func(*Config) {},
		"init":          func(c *Config) { c.Init = []byte("other") },
		"modules":       func(c *Config) { c.Modules = []string{"virtio"} },
		"a file's name": func(c *Config) { c.Files = []File{{Name: "x", Content: []byte("z")}} },
		"its mode":      func(c *Config) { c.Files = []File{{Name: "x", Mode: 1, Content: []byte("z")}} },
		"its content":   func(c *Config) { c.Files = []File{{Name: "x", Content: []byte("y")}} },
	} {
		c := cfg
		change(&c)
		k := build(t, c)
		if twin, ok := seen[k.Initramfs]; ok {
			t.Errorf("%s and %s: %s", name, twin, k.Initramfs)
		}
		seen[k.Initramfs] = name
	}
}

func TestAPinnedKernelThatIsGoneIsReplacedLoudly(t *testing.T) {
	a, cfg := world(t)
	newer(t, a, "6.1.200-1")
	said := warnings(t)
	k := build(t, cfg)
	if k.Pinned || k.Release != "6.1.0-58-cloud-amd64" || k.Lock.Version != "6.1.200-1" || k.Lock.Vmlinux != sum(bytesOf(t, k.Image)) {
		t.Errorf("%+v", k)
	}
	if s := said.String(); !strings.Contains(s, "gone") || !strings.Contains(s, cfg.Lock.Version) || !strings.Contains(s, "6.1.200-1") {
		t.Errorf("said: %s", s)
	}
	// The mirror is away: what was taken before is taken again, and that is said.
	said.Reset()
	a.Intercept(func(w http.ResponseWriter, _ *http.Request) bool { panic(http.ErrAbortHandler) })
	again := build(t, cfg)
	if again.Pinned || again.Image != k.Image || !strings.Contains(said.String(), "away") {
		t.Errorf("%+v, said: %s", again, said)
	}
	// Not when the mirror lies.
	a.Intercept(nil)
	a.Change("/InRelease", func(b []byte) []byte { return bytes.Replace(b, []byte("Test"), []byte("Evil"), 1) })
	if _, err := Build(t.Context(), cfg); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Errorf("a forged Release: %v", err)
	}
	// The pinned one in the cache needs no mirror.
	pinned := kernelDeb(t, release)
	if err := os.WriteFile(filepath.Join(cfg.Cache, "files", sum(pinned)), pinned, 0o444); err != nil {
		t.Fatal(err)
	}
	if k := build(t, cfg); !k.Pinned {
		t.Errorf("%+v", k)
	}
}

func TestAListedKernelWhoseFileIsGone(t *testing.T) {
	a, cfg := world(t)
	pinned := a.Suites[0].Packages[1]
	newer(t, a, "6.1.200-1")
	a.Suites[0].Packages = append(a.Suites[0].Packages, pinned)
	a.Publish()
	a.Change(kernelPackage+"_6.1.192-3_amd64.deb", func([]byte) []byte { return nil })
	warnings(t)
	if k := build(t, cfg); k.Pinned || k.Lock.Version != "6.1.200-1" {
		t.Errorf("%+v", k)
	}
}

func TestWhatBuildRefuses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(a *debiantest.Archive, cfg *Config)
		class  dsec.Class
		text   string
	}{
		{"the mirror's package has another digest than the lock's", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Deb = sum(nil) }, dsec.Corrupt, "lock file"},
		{"the kernel in it has another", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Vmlinux = sum(nil) }, dsec.Corrupt, "lock file"},
		{"a later format", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Format = 2 }, dsec.Unsupported, "format 2"},
		{"another architecture", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Arch = "arm64" }, dsec.Unsupported, "arm64"},
		{"a name that is none", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Package = "../x" }, dsec.Invalid, "no name"},
		{"no such module", func(a *debiantest.Archive, cfg *Config) { cfg.Modules = []string{"nothing"} }, dsec.NotFound, "nothing"},
		{"no such suite", func(a *debiantest.Archive, cfg *Config) { cfg.Lock.Codename = "worm" }, dsec.NotFound, "no source"},
		{"a file out of place", func(a *debiantest.Archive, cfg *Config) { cfg.Files = []File{{Name: "../x"}} }, dsec.Invalid, "no path"},
		{"a file twice", func(a *debiantest.Archive, cfg *Config) { cfg.Files = []File{{Name: "init"}} }, dsec.Invalid, "twice"},
		{"no kernel at all", func(a *debiantest.Archive, cfg *Config) {
			a.Suites[0].Packages = a.Suites[0].Packages[:0]
			a.Publish()
		}, dsec.NotFound, "no suite"},
		{"the mirror is away", func(a *debiantest.Archive, cfg *Config) {
			a.Intercept(func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) })
		}, dsec.Unavailable, "InRelease"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, cfg := world(t)
			c.change(a, &cfg)
			_, err := Build(t.Context(), cfg)
			if dsec.ClassOf(err) != c.class || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v (%s), want %s with %q", err, dsec.ClassOf(err), c.class, c.text)
			}
			whole(t, cfg.Cache)
		})
	}
}

// whole wants a cache in which nothing half made is left.
func whole(t *testing.T, dir string) {
	t.Helper()
	if left, err := filepath.Glob(filepath.Join(dir, "tmp-*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestPackagesThatAreNoKernel(t *testing.T) {
	dir := "./lib/modules/" + release + "/kernel/"
	for _, c := range []struct {
		name string
		deb  []byte
		text string
	}{
		{"no kernel", debiantest.Deb(t, ".xz", debiantest.File{Name: "./usr/share/doc/x", Content: []byte("x")}), "no boot/vmlinuz"},
		{"two kernels", kernelDeb(t, release, debiantest.File{Name: "./boot/vmlinuz-2", Content: vmlinuz(pack(t, ".lz4", fakeVmlinux(t, "2")))}), "two in one"},
		{"a damaged kernel", debiantest.Deb(t, ".xz", debiantest.File{Name: "./boot/vmlinuz-1", Content: []byte("MZ")}), "boot header"},
		{"modules of another", kernelDeb(t, release, debiantest.File{Name: dir + "x.ko", Content: fakeModule(t, "5.0", "x")}), "for kernel"},
		{"a module under another name", kernelDeb(t, release, debiantest.File{Name: dir + "x.ko", Content: fakeModule(t, release, "y")}), "its name is"},
		{"a module twice", kernelDeb(t, release, debiantest.File{Name: dir + "virtio.ko", Content: fakeModule(t, release, "virtio")}), "two of this name"},
		{"a module that is no ELF", kernelDeb(t, release, debiantest.File{Name: dir + "x.ko", Content: []byte("text")}), "x.ko"},
		{"a module that needs what is not there", kernelDeb(t, release, debiantest.File{Name: dir + "x.ko", Content: fakeModule(t, release, "x", "absent")}), "x needs it"},
		{"a module that needs itself", kernelDeb(t, release, debiantest.File{Name: dir + "x.ko", Content: fakeModule(t, release, "x", "y")},
			debiantest.File{Name: dir + "y.ko", Content: fakeModule(t, release, "y", "x")}), "needs itself"},
	} {
		a, cfg := world(t)
		a.Suites[0].Packages[1].Deb = c.deb
		a.Publish()
		cfg.Lock.Deb, cfg.Modules = sum(c.deb), []string{"x"}
		if _, err := Build(t.Context(), cfg); dsec.ClassOf(err) != dsec.Corrupt || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v (%s), want %q", c.name, err, dsec.ClassOf(err), c.text)
		}
		whole(t, cfg.Cache)
	}
}

func TestDamagedFilesOfTheCacheAreMadeAgain(t *testing.T) {
	_, cfg := world(t)
	k := build(t, cfg)
	image, initramfs := bytesOf(t, k.Image), bytesOf(t, k.Initramfs)
	module := filepath.Join(filepath.Dir(k.Image), "modules", "virtio_ring.ko")
	deb := filepath.Join(cfg.Cache, "files", cfg.Lock.Deb)
	for _, damaged := range [][]string{{k.Image}, {k.Initramfs}, {k.Initramfs + ".sum"}, {module, k.Initramfs}, {deb}, {deb, k.Image, module, k.Initramfs},
		{filepath.Join(filepath.Dir(k.Image), "index.json")}} {
		for _, how := range []string{"flipped", "cut off", "gone"} {
			for _, name := range damaged {
				b := bytesOf(t, name)
				if err := os.Remove(name); err != nil {
					t.Fatal(err)
				}
				switch how {
				case "flipped":
					b[len(b)/2] ^= 1
				case "cut off":
					b = b[:len(b)/2]
				case "gone":
					continue
				}
				if err := os.WriteFile(name, b, 0o444); err != nil {
					t.Fatal(err)
				}
			}
			warnings(t)
			again := build(t, cfg)
			if !bytes.Equal(bytesOf(t, again.Image), image) || !bytes.Equal(bytesOf(t, again.Initramfs), initramfs) {
				t.Errorf("%v %s: other bytes", damaged, how)
			}
		}
	}
}

// However many build at once, each thing is fetched and made once.
func TestManyBuildersMakeItOnce(t *testing.T) {
	a, cfg := world(t)
	var fetched atomic.Int32
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, ".deb") {
			fetched.Add(1)
		}
		return false
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if k, err := Build(t.Context(), cfg); err != nil || !k.Pinned {
				t.Errorf("%+v %v", k, err)
			}
		})
	}
	wg.Wait()
	if fetched.Load() != 1 {
		t.Errorf("fetched %d times", fetched.Load())
	}
}

func TestABuilderThatWaitsEndsWithItsContext(t *testing.T) {
	_, cfg := world(t)
	f, err := os.Create(filepath.Join(cfg.Cache, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := linux.Flock(f, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Build(ctx, cfg); dsec.ClassOf(err) != dsec.Timeout {
		t.Errorf("%v", err)
	}
	// A lock of one that was killed is none, and what it left is swept.
	if err := errors.Join(os.MkdirAll(filepath.Join(cfg.Cache, "tmp-1", "modules"), 0o755), f.Close()); err != nil {
		t.Fatal(err)
	}
	build(t, cfg)
	whole(t, cfg.Cache)
}

func TestAFullDiskLeavesNothingHalf(t *testing.T) {
	_, cfg := world(t)
	cfg.Init = bytes.Repeat([]byte("init"), 100000)
	if err := unix.Mount("tmpfs", cfg.Cache, "tmpfs", 0, "size=300k"); err != nil {
		t.Skipf("mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(cfg.Cache, 0); err != nil {
			t.Error(err)
		}
	})
	if _, err := Build(t.Context(), cfg); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("%v (%s)", err, dsec.ClassOf(err))
	}
	whole(t, cfg.Cache)
	if err := unix.Mount("", cfg.Cache, "", unix.MS_REMOUNT, "size=8m"); err != nil {
		t.Fatal(err)
	}
	build(t, cfg)
}

func TestTheLockFile(t *testing.T) {
	l, err := Default()
	if err != nil || l.Arch != "amd64" || !strings.HasPrefix(l.Package, "linux-image-") {
		t.Errorf("%+v %v", l, err)
	}
	for _, text := range []string{"", "{}", `{"format":1,"more":2}`, string(defaultLock) + "{}", strings.Replace(string(defaultLock), `"deb": "4`, `"deb": "g`, 1)} {
		if _, err := ParseLock([]byte(text)); err == nil {
			t.Errorf("taken: %s", text)
		}
	}
}
