package files

import (
	"io"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// residentKiB is what the process has in memory that is its own.
func residentKiB(t *testing.T) int {
	text, err := os.ReadFile("/proc/self/status")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			must(t, err)
			return n
		}
	}
	t.Fatal("no RssAnon in /proc/self/status")
	return 0
}

func TestBigFilesStreamInConstantMemory(t *testing.T) {
	size := int64(64 << 20)
	if os.Getenv("DSEC_LONG") != "" {
		size = 1 << 30
	}
	each(t, func(t *testing.T, s service) {
		before, most := residentKiB(t), 0
		look := func() {
			most = max(most, residentKiB(t)-before)
		}
		_, err := s.fs.Write(t.Context(), "/d/big", &probing{r: noise(size), look: look}, WriteOptions{Parents: true})
		must(t, err)
		n, err := s.fs.Read(t.Context(), "/d/big", 0, -1, &probing{w: io.Discard, look: look})
		must(t, err)
		must(t, s.fs.Download(t.Context(), "/d", &probing{w: io.Discard, look: look}, TreeOptions{}))
		if n != size {
			t.Errorf("read %d bytes", n)
		}
		if most > 24<<10 {
			t.Errorf("memory grew by %d KiB", most)
		}
	})
}

// probing looks at memory every 8 MiB.
type probing struct {
	r    io.Reader
	w    io.Writer
	n    int
	look func()
}

func (p *probing) count(n int) {
	if p.n += n; p.n > 8<<20 {
		p.n = 0
		p.look()
	}
}

func (p *probing) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.count(n)
	return n, err
}

func (p *probing) Write(b []byte) (int, error) {
	n, err := p.w.Write(b)
	p.count(n)
	return n, err
}

// BenchmarkRead compares bytes over the socket with reading a descriptor.
func BenchmarkRead(b *testing.B) {
	const size = 256 << 20
	root := b.TempDir()
	l, err := NewLocal(root)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Write(b.Context(), "/f", noise(size), WriteOptions{}); err != nil {
		b.Fatal(err)
	}
	near, far := socketPair(b, unix.SOCK_STREAM)
	served := make(chan error, 1)
	go func() { served <- Serve(b.Context(), far, l, 0) }()
	c := NewClient(near)
	for name, fs := range map[string]FS{"socket": c, "descriptor": l} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				if n, err := fs.Read(b.Context(), "/f", 0, -1, io.Discard); err != nil || n != size {
					b.Fatal(n, err)
				}
			}
		})
	}
	b.Run("stat", func(b *testing.B) {
		for b.Loop() {
			if _, err := c.Stat(b.Context(), "/f", true); err != nil {
				b.Fatal(err)
			}
		}
	})
	c.Close()
	<-served
}
