package daemon

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/blob/limit"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/blob/stack"
)

func withBlobs(url string) *settings {
	s := defaults()
	s.Blobs = url
	return s
}

func TestWhereBlobsAre(t *testing.T) {
	for setting, want := range map[string]struct {
		url    string
		limits limit.Limits
	}{
		"":                              {"file:///var/lib/dsec/blobs", limit.Limits{}},
		"file:///mnt/3fs/dsec":          {"file:///mnt/3fs/dsec", limit.Limits{}},
		"file:///mnt/x?requests=8":      {"file:///mnt/x", limit.Limits{Requests: 8}},
		"s3://b/p?region=r":             {"s3://b/p?region=r", limit.Limits{}},
		"s3://b?bandwidth=2MiB&region=": {},
		"s3://b?bandwidth=2MiB&region=r&requests=3": {"s3://b?region=r", limit.Limits{Requests: 3, Bandwidth: 2 << 20}},
		"s3://b?requests=0":                         {},
		"s3://b?requests=many":                      {},
		"s3://b?bandwidth=":                         {},
		"s3://b?bandwidth=50%":                      {},
		"s3://k:hunter2@b":                          {},
		"s3://b?secret=hunter2":                     {},
		"file://here":                               {},
	} {
		s := withBlobs(setting)
		url, limits, err := s.blobURL()
		if url != want.url || (err == nil) != (want.url != "") || err == nil && limits != want.limits {
			t.Errorf("%q: %q, %+v, %v", setting, url, limits, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") || strings.Contains(blobPlace(s), "hunter2") {
			t.Errorf("%q: %v at %s", setting, err, blobPlace(s))
		}
	}
}

func TestCredentialsLeaveTheEnvironment(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_PROFILE", "x=y")
	t.Setenv("AWSOME", "stays")
	env := takeCredentials()
	if !slices.Contains(env, "AWS_ACCESS_KEY_ID=AKIDEXAMPLE") || !slices.Contains(env, "AWS_PROFILE=x=y") || slices.Contains(env, "AWSOME=stays") {
		t.Errorf("took %v", env)
	}
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "AWS_") {
			t.Errorf("%s stayed", v)
		}
	}
}

func TestTheDoctorTriesObjectStorage(t *testing.T) {
	server := s3test.Start(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		url  string
		ok   bool
		want []string
	}{
		{"file://" + dir, true, []string{dir, "wrote, read and deleted"}},
		{"file://" + filepath.Join(dir, "later"), true, []string{"not there yet"}},
		{"file://" + file, false, []string{file, "not a directory"}},
		{server.URL("p"), true, []string{s3test.BucketName, server.Endpoint(), "wrote, read and deleted"}},
		{server.BucketURL("none", "p"), false, []string{"s3://none/p", "the bucket does not exist"}},
		{"s3://" + s3test.BucketName + "?endpoint=http://127.0.0.1:1&credentials=" + server.CredentialsFile(), false, []string{"connection refused"}},
	} {
		got := probeBlobs(t.Context(), withBlobs(c.url))
		if got.OK != c.ok || got.Fatal || strings.Contains(got.Detail, server.SecretKey) || strings.Contains(got.Detail, server.AccessKey) {
			t.Errorf("%s: %+v", c.url, got)
		}
		for _, w := range c.want {
			if !strings.Contains(got.Detail, w) {
				t.Errorf("%s: %q lacks %q", c.url, got.Detail, w)
			}
		}
	}
	if names, err := os.ReadDir(filepath.Join(dir, "probe")); err != nil || len(names) != 0 {
		t.Errorf("left %v, %v", names, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "later")); err == nil {
		t.Error("the doctor made a directory")
	}
	server.Proxy.Set(fault.Faults{Mode: fault.Corrupt})
	if got := probeBlobs(t.Context(), withBlobs(server.URL("p"))); got.OK || !strings.Contains(got.Detail, "not what was written") {
		t.Errorf("wrong bytes: %+v", got)
	}
}

func TestWhatIsCountedIsShown(t *testing.T) {
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	f := fault.New(m)
	f.Set(fault.Faults{Mode: fault.Unavailable, Match: func(r fault.Request) bool { return r.N == 0 }})
	s := stack.New(f, stack.Options{Retry: retry.Policy{First: 1}})
	if err := blob.PutBytes(t.Context(), s, "k", []byte("12345"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(blobCounts{"agent", func() (stack.Stats, bool) { return s.Stats(), true }}); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() != "by" {
					name += " " + l.GetValue()
				}
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for name, want := range map[string]float64{"dsec_blob_requests_total put": 2, "dsec_blob_requests_total open": 0,
		"dsec_blob_failures_total unavailable": 1, "dsec_blob_retries_total": 1, "dsec_blob_written_bytes_total": 5, "dsec_blob_in_flight": 0} {
		if n, ok := got[name]; !ok || n != want {
			t.Errorf("%s is %v, want %v", name, n, want)
		}
	}
}

type sweeps struct{ n atomic.Int32 }

func (s *sweeps) Sweep(_ context.Context, age time.Duration) (int, error) {
	if age < time.Hour {
		return 0, os.ErrInvalid
	}
	return int(s.n.Add(1)), nil
}

func TestLeftoversAreSweptAtOnceAndThenNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // whose clock is exact
		var s sweeps
		stop := sweeping(&s, time.Minute, slog.New(slog.DiscardHandler))
		synctest.Wait()
		if n := s.n.Load(); n != 1 {
			t.Errorf("%d times at once", n)
		}
		time.Sleep(2*time.Minute + time.Second)
		n := s.n.Load()
		if n != 3 {
			t.Errorf("%d times in two minutes", n)
		}
		stop()
		time.Sleep(time.Hour)
		if s.n.Load() != n {
			t.Error("it goes on after stop")
		}
	})
}

// TestTheLoaderReadsOnlyWhatItMust: it is not root, and without files to read it
// has no capability.
func TestTheLoaderReadsOnlyWhatItMust(t *testing.T) {
	for blobs, want := range map[string]bool{
		"":                        true, // a directory below the data
		"file:///srv/blobs":       true,
		"s3://b/p?region=r":       false,
		"s3://b/p?credentials=/k": true,
	} {
		s := defaults()
		s.Data, s.Blobs = t.TempDir(), blobs
		if c := s.loaderChild(nil, nil); (len(c.Caps) > 0) != want || c.UID == 0 {
			t.Errorf("%q: capabilities %v, uid %d", blobs, c.Caps, c.UID)
		}
	}
}
