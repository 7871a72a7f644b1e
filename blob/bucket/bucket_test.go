package bucket_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/s3test"
)

func open(t *testing.T, url string) blob.Store {
	t.Helper()
	b, err := bucket.Open(context.Background(), url)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestConformance(t *testing.T) {
	server := s3test.Start(t)
	var n atomic.Int32
	for name, factory := range map[string]func(*testing.T) blob.Store{
		"file": func(t *testing.T) blob.Store { return open(t, "file://"+t.TempDir()) },
		"mem":  func(t *testing.T) blob.Store { return open(t, "mem://") },
		"s3":   func(t *testing.T) blob.Store { return open(t, server.URL(fmt.Sprintf("p%d/q", n.Add(1)))) },
	} {
		t.Run(name, func(t *testing.T) { blobtest.Run(t, factory) })
	}
	if left := uploads(t, server); len(left) > 0 {
		t.Errorf("uploads were left: %v", left)
	}
}

func uploads(t *testing.T, s *s3test.Server) (keys []string) {
	t.Helper()
	out, err := s.Client().ListMultipartUploads(context.Background(), &s3.ListMultipartUploadsInput{Bucket: aws.String(s3test.BucketName)})
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range out.Uploads {
		keys = append(keys, *u.Key)
	}
	return keys
}
