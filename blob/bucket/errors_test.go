package bucket_test

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/s3test"
)

func TestURLs(t *testing.T) {
	for _, u := range []string{"", "file://relative/path", "file:relative", "file:///tmp/x?prefix=y", "ftp://x", "%%", "s3://", "s3:///p", "s3://b/../p",
		"s3://b/a b", "s3://b?endpoint=host:80", "s3://b?endpoint=ftp://host", "s3://b?path_style=perhaps", "s3://b?region=", "s3://b?secret=x",
		"s3://b?region=a&region=b", "s3://b?credentials=relative", "s3://b?a=%zz", "mem://x", "mem:///x"} {
		if err := bucket.Check(u); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("check %q: %v", u, err)
		}
		if _, err := bucket.Open(t.Context(), u); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("open %q: %v", u, err)
		}
	}
	for _, u := range []string{"file:///srv/x/", "s3://b", "s3://b/p/q", "s3://b/p/?region=r&path_style=false", "s3://b?endpoint=https://s3.example:9000", "mem://"} {
		if err := bucket.Check(u); err != nil {
			t.Errorf("%q: %v", u, err)
		}
	}
}

func TestNoSecretIsRepeated(t *testing.T) {
	for _, u := range []string{"s3://AKIDEXAMPLE:hunter2@bucket/p", "s3://hunter2@b", "s3://b?endpoint=http://u:hunter2@host", "s3://b?hunter=hunter2",
		"s3://b/hunter2\x7f", "s3://%hunter2", "file://hunter2/x"} {
		if err := bucket.Check(u); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", u, err)
		}
	}
}

// Answers that no server gives when it is asked to; what the real one says is
// tested with it.
func TestClassesOfAnswers(t *testing.T) {
	var status int
	var code string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		if code != "" && r.Method != http.MethodHead {
			w.Write([]byte("<Error><Code>" + code + "</Code><Message>Said so.</Message></Error>"))
		}
	}))
	defer server.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
	s := open(t, "s3://bucket/p?region=r&endpoint="+server.URL)
	defer s.Close()
	for _, c := range []struct {
		status int
		code   string
		want   dsec.Class
	}{
		{403, "AccessDenied", dsec.PermissionDenied}, {403, "", dsec.PermissionDenied}, {401, "", dsec.PermissionDenied},
		{400, "ExpiredToken", dsec.PermissionDenied}, {403, "SignatureDoesNotMatch", dsec.PermissionDenied},
		{404, "NoSuchKey", dsec.Unavailable}, {404, "NoSuchBucket", dsec.Unavailable}, {404, "", dsec.Unavailable}, {404, "XAdminUserNotFound", dsec.PermissionDenied},
		{429, "", dsec.Unavailable}, {429, "TooManyRequests", dsec.Unavailable}, {503, "SlowDown", dsec.Unavailable}, {500, "InternalError", dsec.Unavailable},
		{502, "", dsec.Unavailable}, {504, "", dsec.Unavailable}, {409, "OperationAborted", dsec.Unavailable},
		{412, "PreconditionFailed", dsec.AlreadyExists}, {409, "ConditionalRequestConflict", dsec.Unavailable},
		{507, "", dsec.NoSpace}, {403, "QuotaExceeded", dsec.NoSpace}, {507, "XMinioStorageFull", dsec.NoSpace},
		{400, "BadDigest", dsec.Corrupt}, {400, "XAmzContentSHA256Mismatch", dsec.Corrupt},
		{400, "AuthorizationHeaderMalformed", dsec.Invalid}, {301, "PermanentRedirect", dsec.Invalid}, {400, "RequestTimeout", dsec.Unavailable},
	} {
		status, code = c.status, c.code
		err := blob.PutBytes(t.Context(), s, "k", []byte("x"), blob.PutOptions{})
		if dsec.ClassOf(err) != c.want {
			t.Errorf("%d %s: %v is %s, want %s", c.status, c.code, err, dsec.ClassOf(err), c.want)
		}
		if text := err.Error(); !strings.HasPrefix(text, "write object k: ") || strings.Contains(text, "operation error") || strings.Contains(text, "hunter2") || len(text) > 120 {
			t.Errorf("%d %s: %q", c.status, c.code, text)
		}
	}
}

func TestARealServerSaysTheSame(t *testing.T) {
	server := s3test.Start(t)
	ctx := t.Context()
	gone := open(t, server.BucketURL("no-such-bucket", "p"))
	defer gone.Close()
	_, openErr := gone.Open(ctx, "k", 0, -1)
	_, statErr := gone.Stat(ctx, "k")
	var listErr error
	for _, listErr = range gone.List(ctx, "") {
	}
	for what, err := range map[string]error{"open": openErr, "stat": statErr, "list": listErr, "delete": gone.Delete(ctx, "k"),
		"put": blob.PutBytes(ctx, gone, "k", []byte("x"), blob.PutOptions{}), "large put": blob.PutBytes(ctx, gone, "k", make([]byte, 9<<20), blob.PutOptions{})} {
		if !errors.Is(err, dsec.Unavailable.Err()) || !strings.Contains(err.Error(), "the bucket does not exist") {
			t.Errorf("no bucket: %s: %v", what, err)
		}
	}
	wrongKey := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(wrongKey, []byte("[default]\naws_access_key_id = "+server.AccessKey+"\naws_secret_access_key = wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	denied := open(t, "s3://"+s3test.BucketName+"/p?endpoint="+server.Endpoint()+"&credentials="+wrongKey)
	defer denied.Close()
	if _, err := denied.Stat(ctx, "k"); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("a wrong key: %v", err)
	}
	none := open(t, "s3://b?endpoint="+server.Endpoint()+"&credentials="+filepath.Join(t.TempDir(), "none"))
	defer none.Close()
	if _, err := none.Stat(ctx, "k"); !errors.Is(err, dsec.PermissionDenied.Err()) || !strings.Contains(err.Error(), "no credentials") {
		t.Errorf("no key: %v", err)
	}
}

// Keys can be changed while it runs, and the environment is not asked when a
// file is named.
func TestCredentialsAreReadFromWhereTheURLSays(t *testing.T) {
	server := s3test.Start(t)
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	named := open(t, server.URL("p"))
	defer named.Close()
	if err := blob.PutBytes(t.Context(), named, "k", []byte("x"), blob.PutOptions{}); err != nil {
		t.Errorf("named: %v", err)
	}
	url := "s3://" + s3test.BucketName + "/p?endpoint=" + server.Endpoint()
	env := open(t, url)
	defer env.Close()
	if _, err := env.Stat(t.Context(), "k"); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("from the environment: %v", err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
	right := open(t, url)
	defer right.Close()
	if _, err := right.Stat(t.Context(), "k"); err != nil {
		t.Errorf("from the environment: %v", err)
	}
	os.Unsetenv("AWS_ACCESS_KEY_ID")
	os.Unsetenv("AWS_SECRET_ACCESS_KEY")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", server.CredentialsFile())
	file := open(t, url)
	defer file.Close()
	if _, err := file.Stat(t.Context(), "k"); err != nil {
		t.Errorf("from the file of the environment: %v", err)
	}
}

// A disk that is full, of a directory and of a server.
func TestNoSpace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small disk")
	}
	small := t.TempDir()
	if err := syscall.Mount("none", small, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	})
	s := open(t, "file://"+small)
	defer s.Close()
	old := bytes.Repeat([]byte("x"), 1<<20)
	if err := blob.PutBytes(t.Context(), s, "k", old, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"k", "new"} {
		if err := blob.PutBytes(t.Context(), s, key, make([]byte, 5<<20), blob.PutOptions{}); !errors.Is(err, dsec.NoSpace.Err()) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if b, err := blob.ReadAll(t.Context(), s, "k", 1<<20); err != nil || !bytes.Equal(b, old) {
		t.Errorf("now %d bytes, %v", len(b), err)
	}
	if left := below(t, filepath.Join(small, ".writing")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if err := blob.PutBytes(t.Context(), s, "new", make([]byte, 2<<20), blob.PutOptions{}); err != nil {
		t.Errorf("what fits: %v", err)
	}
}
