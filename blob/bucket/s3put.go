package bucket

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

const (
	partSize    = 8 << 20 // bytes; S3 wants 5 MiB at least
	maxParts    = 10_000  // S3's
	partsAtOnce = 4
	partTries   = 4
	abortWithin = 20 * time.Second
)

// Put writes what fits into one part with one request, and the rest in parts.
// The body is read here, by nobody else and not after Put has returned.
func (o *object) Put(ctx context.Context, key string, r io.Reader, opts blob.PutOptions) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	size, err := sizeOfParts(r)
	if err != nil {
		return classify(writeOp, key, err)
	}
	first, err := readPart(r, size)
	if err != nil {
		return classify(writeOp, key, err)
	}
	if int64(len(first)) < size {
		err = o.putSmall(ctx, key, first, opts)
	} else {
		err = o.putParts(ctx, key, first, r, opts)
	}
	if err == nil {
		return nil
	}
	err = classify(writeOp, key, err)
	if dsec.ClassOf(err) == dsec.NotFound { // no key is asked for: whatever answers is no S3
		err = dsec.E(dsec.Unavailable, writeOp, key, errors.Unwrap(err))
	}
	return err
}

func ifNoneMatch(opts blob.PutOptions) *string {
	if opts.IfAbsent {
		return aws.String("*")
	}
	return nil
}

// sizeOfParts is larger for a body that would have too many.
func sizeOfParts(r io.Reader) (int64, error) {
	s, ok := r.(io.Seeker)
	if !ok {
		return partSize, nil
	}
	at, err := s.Seek(0, io.SeekCurrent)
	if err != nil {
		return partSize, nil // a pipe
	}
	end, err := s.Seek(0, io.SeekEnd)
	if err != nil {
		return partSize, nil
	}
	if _, err := s.Seek(at, io.SeekStart); err != nil {
		return 0, err
	}
	return max(partSize, (end-at)/(maxParts-1)+1), nil
}

// readPart reads size bytes, or what is left. It grows with what comes: most
// bodies are small.
func readPart(r io.Reader, size int64) ([]byte, error) {
	var b bytes.Buffer
	_, err := io.CopyN(&b, r, size)
	if err == io.EOF {
		err = nil
	}
	return b.Bytes(), err
}

func (o *object) putSmall(ctx context.Context, key string, body []byte, opts blob.PutOptions) error {
	_, err := o.client.PutObject(ctx, &s3.PutObjectInput{Bucket: &o.name, Key: aws.String(o.prefix + key), Body: bytes.NewReader(body),
		ContentType: aws.String(contentType), IfNoneMatch: ifNoneMatch(opts)})
	return err
}

// putParts writes a large object. Whatever happens short of the death of this
// process, either the object is there or nothing is.
func (o *object) putParts(ctx context.Context, key string, first []byte, r io.Reader, opts blob.PutOptions) error {
	if opts.IfAbsent { // ask before everything is sent for nothing
		if _, err := o.Stat(ctx, key); err == nil {
			return dsec.Errorf(dsec.AlreadyExists, writeOp, key, "the key is taken")
		}
	}
	full := aws.String(o.prefix + key)
	begun, err := o.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &o.name, Key: full, ContentType: aws.String(contentType)})
	if err != nil {
		return err
	}
	parts, err := o.sendParts(ctx, &s3.UploadPartInput{Bucket: &o.name, Key: full, UploadId: begun.UploadId}, first, r)
	if err == nil {
		_, err = o.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{Bucket: &o.name, Key: full, UploadId: begun.UploadId,
			IfNoneMatch: ifNoneMatch(opts), MultipartUpload: &types.CompletedMultipartUpload{Parts: parts}})
	}
	if err == nil {
		return nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortWithin)
	defer cancel()
	if aerr := o.abort(undo, *full, begun.UploadId); aerr != nil && code(aerr) != "NoSuchUpload" {
		err = errors.Join(err, classify("give up upload", key, aerr))
	}
	return err
}

// sendParts sends some at a time. A part is tried again here: whoever tries the
// Put again sends everything.
func (o *object) sendParts(ctx context.Context, to *s3.UploadPartInput, first []byte, r io.Reader) ([]types.CompletedPart, error) {
	var parts []types.CompletedPart
	again := func(o *s3.Options) {
		o.Retryer = retry.NewStandard(func(so *retry.StandardOptions) { so.MaxAttempts = partTries })
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(partsAtOnce)
	size := int64(len(first))
	for body := first; len(body) > 0; {
		n := len(parts)
		if n == maxParts {
			_ = g.Wait()
			return nil, dsec.Errorf(dsec.Invalid, writeOp, *to.Key, "larger than %d parts of %d bytes", maxParts, size)
		}
		parts = append(parts, types.CompletedPart{PartNumber: aws.Int32(int32(n + 1))})
		in, part := *to, body
		in.PartNumber, in.Body = aws.Int32(int32(n+1)), bytes.NewReader(part)
		tag := new(string)
		parts[n].ETag = tag
		g.Go(func() error {
			out, err := o.client.UploadPart(gctx, &in, again)
			if err == nil {
				*tag = aws.ToString(out.ETag)
			}
			return err
		})
		if gctx.Err() != nil {
			break
		}
		var err error
		if body, err = readPart(r, size); err != nil {
			g.Go(func() error { return err })
			break
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return parts, ctx.Err() // it may have ended between two parts
}
