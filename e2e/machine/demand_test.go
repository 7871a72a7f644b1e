package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// TestD13_TheDiskLimitHoldsOverEveryLayer: what a sandbox writes, what it copies up
// to change, and what is uploaded into it. A file of the layer that does not fit
// stays what it is.
func TestD13_TheDiskLimitHoldsOverEveryLayer(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, s *site) {
		big := noise("big", 45<<20)
		s.layer("box", grown(t, base(t, 20), func(put func(string, int64, []byte)) { put("srv/big", 0o644, big) }))
		id := s.create(func(x *dsec.Spec) { x.Limits.Disk = 32 << 20 })
		full := regexp.MustCompile("No space left on device|Disk quota exceeded")
		out, r := s.sh(id, "dd if=/dev/zero of=/root/big bs=1M count=45; wc -c </root/big")
		var size int64
		if _, err := fmt.Sscan(out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:], &size); err != nil || !full.MatchString(out) || size < 24<<20 || size > 32<<20 {
			t.Errorf("45 MiB into 32: %q, %+v, %v", out, r, err)
		}
		fs := s.Files(id, "")
		if _, err := fs.Write(t.Context(), "/root/upload", bytes.NewReader(big), files.WriteOptions{}); dsec.ClassOf(err) != dsec.NoSpace {
			t.Errorf("upload onto a full disk: %v", err)
		}
		if _, err := s.Stop(t.Context(), id, ""); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Start(t.Context(), id); err != nil {
			t.Fatal("start on a full disk:", err)
		}
		if out, _ := s.sh(id, "/bin/busybox rm /root/big; echo more >>/srv/big"); !full.MatchString(out) {
			t.Errorf("a file of 45 MiB was copied up: %q", out)
		}
		if out, _ := s.sh(id, "sha256sum </srv/big; echo little >>/opt/3 && tail -c 7 /opt/3"); out != fmt.Sprintf("%x  -\nlittle\n", sha256.Sum256(big)) {
			t.Errorf("afterwards: %q", out)
		}
		for _, id := range []dsec.SandboxID{id, s.create(nil)} {
			if out, _ := s.sh(id, "sha256sum </opt/7"); out != fmt.Sprintf("%x  -\n", sha256.Sum256(noise("7", 512<<10))) {
				t.Errorf("a later session: %q", out)
			}
		}
		s.came("box")
	})
}

// TestH5_CommandsThatStartWhileItIsPackedRead what is not here yet: they are neither
// frozen for good nor given anything else.
func TestH5_CommandsThatStartWhileItIsPackedRead(t *testing.T) {
	t.Parallel()
	const commands = 20
	eachWay(t, func(t *testing.T, s *site) {
		s.layer("box", base(t, commands))
		id := s.create(nil)
		ctx, stop := context.WithCancel(t.Context())
		packed := make(chan int)
		go func() {
			n := 0
			defer func() { packed <- n }()
			for ; ctx.Err() == nil; n++ {
				if _, err := s.Commit(t.Context(), id, client.CommitOptions{}); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		var all sync.WaitGroup
		for i := range commands {
			all.Go(func() {
				want := fmt.Sprintf("%x  -\n", sha256.Sum256(noise(fmt.Sprint(i), 512<<10)))
				if out, r := s.sh(id, fmt.Sprintf("sha256sum </opt/%d", i)); out != want || r.Status != process.Exited {
					t.Errorf("%d: %q, %+v", i, out, r)
				}
			})
		}
		all.Wait()
		stop()
		if n := <-packed; n == 0 {
			t.Error("it was never packed")
		}
		s.came("box")
	})
}

// TestH8_AChainOfPackedDisksComesOnDemand packs, goes on from there and packs, twenty
// times; what is restored of it is brought as it is read.
func TestH8_AChainOfPackedDisksComesOnDemand(t *testing.T) {
	t.Parallel()
	const sessions, large = 20, 4 // every large-th session writes what is not fetched whole
	eachWay(t, func(t *testing.T, s *site) {
		s.layer("box", base(t, 20))
		var sums bytes.Buffer
		from, digests := dsec.LayerRef("box"), []string(nil)
		for i := range sessions {
			id := s.create(func(x *dsec.Spec) { x.Image = from })
			b := noise(fmt.Sprint("session ", i), 1000+i)
			if i%large == 0 {
				b = noise(fmt.Sprint("session ", i), 9<<20)
			}
			if _, err := s.Files(id, "").Write(t.Context(), fmt.Sprintf("/root/%d", i), bytes.NewReader(b), files.WriteOptions{}); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&sums, "%x  /root/%d\n", sha256.Sum256(b), i)
			if _, err := s.Commit(t.Context(), id, client.CommitOptions{Tag: "chain"}); err != nil {
				t.Fatal(i, err)
			}
			if _, err := s.Delete(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			from = "chain"
		}
		last := s.create(func(x *dsec.Spec) { x.Image = from })
		sb, err := s.Get(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		if digests = sb.Digests; len(digests) > 9 {
			t.Errorf("made of %d layers", len(digests))
		}
		if _, err := s.Delete(t.Context(), last); err != nil {
			t.Fatal(err)
		}
		var gone []dsec.LayerRef
		for _, d := range digests {
			if !s.lazy {
				break
			}
			freed, err := s.EvictLayer(t.Context(), dsec.LayerRef(d))
			if err != nil {
				t.Fatal(err)
			}
			if freed > 0 {
				gone = append(gone, dsec.LayerRef(d))
			}
		}
		if s.lazy && len(gone) < 2 {
			t.Errorf("only %v of %v are not here: the test tests little", gone, digests)
		}
		id := s.create(func(x *dsec.Spec) { x.Image = from })
		if _, err := s.Files(id, "").Write(t.Context(), "/tmp/sums", &sums, files.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		if out, r := s.sh(id, "sha256sum -cs /tmp/sums && echo right; ls /root | wc -l"); out != fmt.Sprintf("right\n%d\n", sessions) {
			t.Errorf("%q %+v", out, r)
		}
		for _, ref := range gone {
			s.came(ref)
		}
	})
}

// linked adds a program of this machine and what it is linked with.
func linked(t *testing.T, name string, put func(string, int64, []byte)) {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("Debian's %s is needed: %v", name, err)
	}
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(regexp.MustCompile(`/[^ )\n]+`).FindAllString(string(out), -1), program) {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		put(strings.TrimPrefix(filepath.Clean(f), "/"), 0o755, b)
	}
}

// TestH11_ARunningDatabaseIsConsistent packs a disk while SQLite, which comes as it
// is executed, writes to it, and has it check what was restored.
func TestH11_ARunningDatabaseIsConsistent(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, s *site) {
		s.layer("box", grown(t, base(t, 20), func(put func(string, int64, []byte)) { linked(t, "sqlite3", put) }))
		for _, mode := range []string{"wal", "delete"} {
			id := s.create(nil)
			// Who looks must not keep the writer from its first lock.
			p, err := s.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", `exec 2>&1; db="sqlite3 -cmd '.timeout 5000' /root/db"
				echo "pragma journal_mode=` + mode + `; pragma synchronous=off; create table t(i integer primary key, x blob);" | eval $db
				i=0; while :; do i=$((i+1)); echo "insert into t(x) values(randomblob(3000));"; [ $i = 50 ] && echo "update t set x=randomblob(2000) where i % 7 = 1;" && i=0; done | eval $db`}})
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "there are rows", func() bool {
				out, _ := s.sh(id, `echo 'select count(*)>300 from t' | sqlite3 -cmd '.timeout 5000' /root/db`)
				return out == "1\n"
			})
			if _, err := s.Commit(t.Context(), id, client.CommitOptions{Tag: "db"}); err != nil {
				t.Fatal(err)
			}
			again := s.create(func(x *dsec.Spec) { x.Image = "db" })
			if out, _ := s.sh(again, `echo "pragma integrity_check; select count(*) > 300 from t;" | sqlite3 /root/db`); out != "ok\n1\n" {
				t.Errorf("%s: %q", mode, out)
			}
			if _, err := p.Kill(t.Context()); err != nil {
				t.Error(err)
			}
			for _, id := range []dsec.SandboxID{id, again} {
				if _, err := s.Delete(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
		}
		s.came("box")
	})
}
