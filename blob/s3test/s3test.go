// Package s3test starts a real S3 server (versitygw) on loopback for tests and
// benchmarks, behind a proxy that can break it while it runs.
//
//	s := s3test.Start(t)
//	store, err := bucket.Open(ctx, s.URL("prefix"))
//	s.Proxy.Set(fault.Faults{Latency: 20 * time.Millisecond})
//
// The server listens on a unix socket below its directory, the proxy on a port
// of 127.0.0.1 that stays its own even while it refuses connections. Keys are
// random; they are in the server's environment and in a credentials file that
// the URL names. The server ends with its owner, however that ends.
package s3test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec"
)

// BucketName is the bucket that every server has.
const BucketName = "dsec-test"

const (
	region      = "us-east-1"
	readyWithin = time.Minute
	pollEvery   = 5 * time.Millisecond
)

// Options say where.
type Options struct {
	Dir    string // empty, for data and socket; its path at most 80 bytes
	Binary string // "": $DSEC_VERSITYGW, or what scripts/tools.sh built
}

// Server is one that runs.
type Server struct {
	Proxy                *Proxy
	AccessKey, SecretKey string

	dir, binary string
	mu          sync.Mutex
	run         *process // nil: stopped
	log         lockedBuffer
}

// Start starts a server for the life of a test.
func Start(t testing.TB) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "s3test-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s, err := Run(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("S3 server: %s", s.log.String())
		}
	})
	return s
}

// Run starts a server; Close ends it.
func Run(o Options) (*Server, error) {
	binary, err := find(o.Binary)
	if err != nil {
		return nil, err
	}
	s := &Server{AccessKey: dsec.Random(20), SecretKey: dsec.Random(40), dir: o.Dir, binary: binary}
	text := fmt.Sprintf("[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", s.AccessKey, s.SecretKey)
	if err := os.WriteFile(s.CredentialsFile(), []byte(text), 0o600); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.Data(), 0o700); err != nil {
		return nil, err
	}
	if s.Proxy, err = newProxy(s.socket()); err != nil {
		return nil, err
	}
	if err := s.Restart(); err != nil {
		s.Proxy.Close()
		return nil, err
	}
	if err := s.makeBucket(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// find says how to get the server if it is not there.
func find(binary string) (string, error) {
	if binary == "" {
		binary = os.Getenv("DSEC_VERSITYGW")
	}
	if binary == "" {
		_, file, _, _ := runtime.Caller(0)
		dir := filepath.Dir(file)
		if !filepath.IsAbs(dir) { // built with -trimpath
			dir, _ = os.Getwd()
		}
		for ; ; dir = filepath.Dir(dir) {
			if _, err := os.Stat(filepath.Join(dir, "scripts", "tools.sh")); err == nil || dir == filepath.Dir(dir) {
				break
			}
		}
		binary = filepath.Join(dir, ".cache", "bin", "versitygw")
	}
	if _, err := os.Stat(binary); err != nil {
		return "", fmt.Errorf("start S3 server: %w: scripts/tools.sh builds it (make setup does, too), or set DSEC_VERSITYGW", err)
	}
	return binary, nil
}

// Data is the directory below which the server keeps buckets.
func (s *Server) Data() string { return filepath.Join(s.dir, "data") }

// CredentialsFile has the keys as ~/.aws/credentials has them.
func (s *Server) CredentialsFile() string { return filepath.Join(s.dir, "credentials") }

func (s *Server) socket() string { return filepath.Join(s.dir, "sock") }

// Endpoint is the proxy's address as a URL.
func (s *Server) Endpoint() string { return "http://" + s.Proxy.Address() }

// URL for bucket.Open, with everything below a prefix.
func (s *Server) URL(prefix string) string { return s.BucketURL(BucketName, prefix) }

// BucketURL is URL for another bucket, which need not be there.
func (s *Server) BucketURL(bucket, prefix string) string {
	q := url.Values{"endpoint": {s.Endpoint()}, "region": {region}, "credentials": {s.CredentialsFile()}}
	return (&url.URL{Scheme: "s3", Host: bucket, Path: "/" + prefix, RawQuery: q.Encode()}).String()
}

// Client speaks to the server directly, past the proxy.
func (s *Server) Client() *s3.Client {
	return s3.New(s3.Options{Region: region, UsePathStyle: true, BaseEndpoint: aws.String("http://s3.invalid"),
		Credentials: credentials.NewStaticCredentialsProvider(s.AccessKey, s.SecretKey, ""),
		HTTPClient:  &http.Client{Transport: &http.Transport{DialContext: s.Proxy.dial, DisableKeepAlives: true}}})
}

func (s *Server) makeBucket() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	_, err := s.Client().CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(BucketName)})
	return err
}

// Restart starts the server again, or for the first time, and returns when it
// answers.
func (s *Server) Restart() error {
	if err := s.Stop(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := exec.Command(s.binary, "--port", s.socket(), "--region", region, "--quiet", "posix", s.Data())
	c.Env = []string{"ROOT_ACCESS_KEY_ID=" + s.AccessKey, "ROOT_SECRET_ACCESS_KEY=" + s.SecretKey, "HOME=" + s.dir, "PATH=" + os.Getenv("PATH")}
	c.Stdout, c.Stderr = &s.log, &s.log
	run, err := start(c)
	if err != nil {
		return fmt.Errorf("start S3 server: %w", err)
	}
	if err := s.await(run); err != nil {
		run.kill()
		return err
	}
	s.run = run
	return nil
}

func (s *Server) await(run *process) error {
	deadline := time.Now().Add(readyWithin)
	for {
		c, err := net.Dial("unix", s.socket())
		if err == nil {
			return c.Close()
		}
		select {
		case <-run.done:
			return fmt.Errorf("start S3 server: it ended: %v: %s", run.err, s.log.String())
		case <-time.After(pollEvery):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("start S3 server: not ready within %v: %s", readyWithin, s.log.String())
		}
	}
}

// Stop kills the server as a power cut would; what it holds stays.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run != nil {
		s.run.kill()
		s.run = nil
	}
	if err := os.Remove(s.socket()); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

// Close ends server and proxy.
func (s *Server) Close() error {
	s.Proxy.Close()
	return s.Stop()
}

// process is killed with the thread that started it, so that thread waits.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // after done
}

func start(c *exec.Cmd) (*process, error) {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	p := &process{cmd: c, done: make(chan struct{})}
	began := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := c.Start()
		began <- err
		if err == nil {
			p.err = c.Wait()
			close(p.done)
		}
		runtime.UnlockOSThread()
	}()
	return p, <-began
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
