package bucket

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"
	gocloud "gocloud.dev/blob"
	"gocloud.dev/blob/s3blob"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

const contentType = "application/octet-stream"

// object storage is a remote machine with many connections: what is kept open
// is not dialed again for every chunk.
const idleConns = 128

// object is an S3 bucket, or what is below a prefix of it.
type object struct {
	bucket
	client *s3.Client
	name   string
	prefix string // with the slash at its end, or empty
	seen   atomic.Int64
}

// s3Query are the parameters there are, and what their values must look like.
var s3Query = map[string]func(string) bool{
	"endpoint": func(v string) bool {
		e, err := url.Parse(v)
		return err == nil && (e.Scheme == "http" || e.Scheme == "https") && e.Host != "" && e.User == nil
	},
	"region":      func(v string) bool { return v != "" },
	"profile":     func(v string) bool { return v != "" },
	"path_style":  func(v string) bool { _, err := strconv.ParseBool(v); return err == nil },
	"credentials": path.IsAbs,
}

func checkS3(u *url.URL, q url.Values) error {
	if u.Host == "" {
		return dsec.Errorf(dsec.Invalid, openOp, "", "no bucket: want s3://bucket/prefix")
	}
	if prefix := strings.Trim(u.Path, "/"); prefix != "" {
		if err := blob.CheckKey(prefix); err != nil {
			return err
		}
	}
	for name, values := range q {
		ok, known := s3Query[name]
		if !known || len(values) != 1 || !ok(values[0]) {
			return dsec.Errorf(dsec.Invalid, openOp, "", "%s in the query: want endpoint=http(s)://host, region=, path_style=true or false, profile=, credentials=/path",
				dsec.Quote(name))
		}
	}
	return nil
}

func openS3(ctx context.Context, u *url.URL) (blob.Store, error) {
	q := u.Query()
	cfg, err := awsConfig(ctx, q)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, openOp, "s3://"+u.Host, err)
	}
	endpoint := q.Get("endpoint")
	if cfg.Region == "" && endpoint == "" && cfg.BaseEndpoint == nil {
		return nil, dsec.Errorf(dsec.Invalid, openOp, "s3://"+u.Host, "no region: add region= to the URL, or set AWS_REGION")
	}
	style := endpoint != ""
	if v := q.Get("path_style"); v != "" {
		style, _ = strconv.ParseBool(v) // checked
	}
	client := s3.NewFromConfig(cfg, func(o *s3.Options) {
		o.UsePathStyle = style
		if o.Region == "" {
			o.Region = "us-east-1"
		}
		if endpoint != "" {
			o.BaseEndpoint = aws.String(endpoint)
		}
	})
	b, err := s3blob.OpenBucket(ctx, client, u.Host, &s3blob.Options{RequestChecksumCalculation: cfg.RequestChecksumCalculation})
	if err != nil {
		return nil, classify(openOp, "s3://"+u.Host, err)
	}
	o := &object{bucket: bucket{b}, client: client, name: u.Host}
	if o.prefix = strings.Trim(u.Path, "/"); o.prefix != "" {
		o.prefix += "/"
		o.b = gocloud.PrefixedBucket(o.b, o.prefix)
	}
	return o, nil
}

// awsConfig reads what the SDK reads. Bodies are signed with their digest, so
// the checksums that only some servers know are left out unless a request needs
// one.
func awsConfig(ctx context.Context, q url.Values) (aws.Config, error) {
	options := []func(*config.LoadOptions) error{
		config.WithLogger(logging.Nop{}), // what matters is in errors
		config.WithRetryer(func() aws.Retryer { return aws.NopRetryer{} }),
		config.WithRequestChecksumCalculation(aws.RequestChecksumCalculationWhenRequired),
		config.WithResponseChecksumValidation(aws.ResponseChecksumValidationWhenRequired),
		config.WithHTTPClient(awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
			t.MaxIdleConns, t.MaxIdleConnsPerHost, t.DisableCompression = idleConns, idleConns, true
		})),
	}
	for name, option := range map[string]func(string) config.LoadOptionsFunc{
		"region": config.WithRegion, "profile": config.WithSharedConfigProfile,
	} {
		if v := q.Get(name); v != "" && (name != "profile" || q.Get("credentials") == "") {
			options = append(options, option(v))
		}
	}
	cfg, err := config.LoadDefaultConfig(ctx, options...)
	if file := q.Get("credentials"); err == nil && file != "" {
		cfg.Credentials = aws.NewCredentialsCache(credentialsFile{file, q.Get("profile")})
	}
	return cfg, err
}

// credentialsFile is read again every minute, so that keys can be changed, and
// wins over the environment of who started us, because it was named.
type credentialsFile struct{ path, profile string }

const rereadCredentials = time.Minute

func (f credentialsFile) Retrieve(ctx context.Context) (aws.Credentials, error) {
	profile := f.profile
	if profile == "" {
		profile = config.DefaultSharedConfigProfile
	}
	shared, err := config.LoadSharedConfigProfile(ctx, profile, func(o *config.LoadSharedConfigOptions) {
		o.CredentialsFiles, o.ConfigFiles = []string{f.path}, []string{}
	})
	if err != nil {
		return aws.Credentials{}, err
	}
	c := shared.Credentials
	if !c.HasKeys() {
		return c, errors.New("no aws_access_key_id and aws_secret_access_key in " + f.path)
	}
	c.CanExpire, c.Expires = true, time.Now().Add(rereadCredentials)
	return c, nil
}

// Open tells an unknown key from a bucket, or a server, that is not there.
func (o *object) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	r, err := o.bucket.Open(ctx, key, off, n)
	if dsec.ClassOf(err) == dsec.NotFound {
		if gone := o.bucketGone(ctx, readOp, key); gone != nil {
			return nil, gone
		}
	}
	return r, err
}

// Stat tells them apart, too: the answer to it looks the same.
func (o *object) Stat(ctx context.Context, key string) (blob.Info, error) {
	i, err := o.bucket.Stat(ctx, key)
	if dsec.ClassOf(err) == dsec.NotFound {
		if gone := o.bucketGone(ctx, statOp, key); gone != nil {
			return i, gone
		}
	}
	return i, err
}

// sure is how long a bucket that was seen is taken to be there.
const sure = time.Minute

// bucketGone asks for a list, because the answer to that says in words what is
// wrong, as an answer without a body does not.
func (o *object) bucketGone(ctx context.Context, op, key string) error {
	if time.Since(time.Unix(0, o.seen.Load())) < sure {
		return nil
	}
	_, err := o.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &o.name, MaxKeys: aws.Int32(1)})
	if err != nil && code(err) != "AccessDenied" { // which says nothing
		return classify(op, key, err)
	}
	o.seen.Store(time.Now().UnixNano())
	return nil
}

// Delete is one request: S3 deletes an unknown key as readily.
func (o *object) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	_, err := o.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &o.name, Key: aws.String(o.prefix + key)})
	if err != nil && code(err) != "NoSuchKey" {
		return classify(deleteOp, key, err)
	}
	return nil
}

// Sweep implements blob.Sweeper: it gives up uploads that nobody will finish.
func (o *object) Sweep(ctx context.Context, age time.Duration) (n int, err error) {
	pages := s3.NewListMultipartUploadsPaginator(o.client, &s3.ListMultipartUploadsInput{Bucket: &o.name, Prefix: &o.prefix})
	before := time.Now().Add(-age)
	for pages.HasMorePages() {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return n, classify(sweepOp, "s3://"+o.name, err)
		}
		for _, u := range page.Uploads {
			if u.Initiated == nil || u.Initiated.After(before) || u.Key == nil {
				continue
			}
			if err := o.abort(ctx, *u.Key, u.UploadId); err != nil && code(err) != "NoSuchUpload" {
				return n, classify(sweepOp, *u.Key, err)
			}
			n++
		}
	}
	return n, nil
}

func (o *object) abort(ctx context.Context, key string, upload *string) error {
	_, err := o.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &o.name, Key: &key, UploadId: upload})
	return err
}
