package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	"gocloud.dev/gcerrors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
)

// What is being done, in errors.
const (
	readOp   = "read object"
	writeOp  = "write object"
	statOp   = "stat object"
	deleteOp = "delete object"
	listOp   = "list objects"
	sweepOp  = "remove leftovers"
)

// classify gives an error the class that the contract promises and a text
// without the layers of libraries it came through.
func classify(op, object string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	class := fault.Class(err, "")
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return dsec.E(dsec.Timeout, op, object, context.DeadlineExceeded)
	case errors.Is(err, context.Canceled):
		return dsec.E(dsec.Canceled, op, object, context.Canceled)
	case answered(err):
		class = ofAnswer(err)
		err = answer(err)
	case ofErrno(err) != "":
		class = ofErrno(err)
	case class != "":
	case gcerrors.Code(err) == gcerrors.NotFound:
		class = dsec.NotFound
	case gcerrors.Code(err) == gcerrors.FailedPrecondition:
		class = dsec.AlreadyExists
	default:
		// The request did not reach the server or its answer did not reach us.
		class = dsec.Unavailable
		err = withoutURL(err)
	}
	return dsec.E(class, op, object, err)
}

// ofErrno classes what a mounted file system says when what is behind it is
// away, and what no other store has.
func ofErrno(err error) dsec.Class {
	e, ok := errors.AsType[syscall.Errno](err)
	if !ok {
		return ""
	}
	switch e {
	case syscall.EIO, syscall.ESTALE, syscall.ENOTCONN, syscall.EREMOTEIO, syscall.ETIMEDOUT, syscall.EHOSTDOWN, syscall.EHOSTUNREACH,
		syscall.EAGAIN, syscall.EMFILE, syscall.ENFILE, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE:
		return dsec.Unavailable
	case syscall.EROFS:
		return dsec.PermissionDenied
	case syscall.ENOTDIR, syscall.EISDIR:
		return dsec.Conflict
	case syscall.ENAMETOOLONG:
		return dsec.Invalid
	}
	return ""
}

// answered says that a server gave an answer that is an error.
func answered(err error) bool {
	_, api := errors.AsType[smithy.APIError](err)
	return api || status(err) != 0 || unsigned(err)
}

// unsigned: there are no credentials to sign with, or they cannot be had.
func unsigned(err error) bool {
	_, ok := errors.AsType[*smithy.OperationError](err)
	return ok && strings.Contains(err.Error(), "get identity: get credentials")
}

// status of an HTTP answer; 0 if there was none.
func status(err error) int {
	if re, ok := errors.AsType[*awshttp.ResponseError](err); ok && re.ResponseError != nil && re.Response != nil {
		return re.HTTPStatusCode()
	}
	return 0
}

func code(err error) string {
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		return api.ErrorCode()
	}
	return ""
}

// ofCode are the codes that say more than the status of their answer, or that
// servers give with different ones.
var ofCode = map[string]dsec.Class{
	"NoSuchBucket": dsec.Unavailable, // somebody else's mistake, never that of who asks for a key
	"NoSuchUpload": dsec.Unavailable,
	"NoSuchKey":    dsec.NotFound,
	"NotFound":     dsec.NotFound, // of an answer without a body

	"PreconditionFailed":         dsec.AlreadyExists,
	"ConditionalRequestConflict": dsec.Unavailable,
	"OperationAborted":           dsec.Unavailable,

	"AccessDenied": dsec.PermissionDenied, "ExpiredToken": dsec.PermissionDenied, "InvalidToken": dsec.PermissionDenied,
	"InvalidAccessKeyId": dsec.PermissionDenied, "SignatureDoesNotMatch": dsec.PermissionDenied, "AccountProblem": dsec.PermissionDenied,
	"XAdminUserNotFound": dsec.PermissionDenied, // versitygw's, with HTTP 404

	"SlowDown": dsec.Unavailable, "RequestTimeout": dsec.Unavailable, "IncompleteBody": dsec.Unavailable, "Throttling": dsec.Unavailable,
	"ThrottlingException": dsec.Unavailable, "TooManyRequests": dsec.Unavailable, "RequestLimitExceeded": dsec.Unavailable,

	"BadDigest": dsec.Corrupt, "InvalidDigest": dsec.Corrupt, "XAmzContentSHA256Mismatch": dsec.Corrupt, "XAmzContentChecksumMismatch": dsec.Corrupt,

	"QuotaExceeded": dsec.NoSpace, "StorageFull": dsec.NoSpace, "XMinioStorageFull": dsec.NoSpace, "InsufficientStorage": dsec.NoSpace,
	"XMinioAdminBucketQuotaExceeded": dsec.NoSpace, "EntityTooLarge": dsec.NoSpace,
}

func ofAnswer(err error) dsec.Class {
	if c, ok := ofCode[code(err)]; ok {
		return c
	}
	if unsigned(err) {
		return dsec.PermissionDenied
	}
	switch s := status(err); {
	case s == http.StatusNotFound:
		return dsec.Unavailable // of something else than a key: who answers there is no S3, or the wrong one
	case s == http.StatusUnauthorized, s == http.StatusForbidden:
		return dsec.PermissionDenied
	case s == http.StatusPreconditionFailed:
		return dsec.AlreadyExists
	case s == http.StatusInsufficientStorage:
		return dsec.NoSpace
	case s == http.StatusTooManyRequests, s == http.StatusRequestTimeout, s == http.StatusConflict, s >= 500:
		return dsec.Unavailable
	case s >= 300:
		return dsec.Invalid
	}
	return dsec.Unavailable // an answer that could not be read
}

// answer is what the server said, in one line.
func answer(err error) error {
	if unsigned(err) {
		return fmt.Errorf("no credentials (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file with credentials=): %w", innermost(err))
	}
	api, ok := errors.AsType[smithy.APIError](err)
	s := status(err)
	switch {
	case !ok:
		return fmt.Errorf("HTTP %d: %w", s, withoutURL(innermost(err)))
	case api.ErrorMessage() == "", api.ErrorMessage() == api.ErrorCode():
		return fmt.Errorf("%s (HTTP %d)", api.ErrorCode(), s)
	case code(err) == "NoSuchBucket":
		return errors.New("the bucket does not exist")
	}
	return fmt.Errorf("%s: %s (HTTP %d)", api.ErrorCode(), strings.TrimRight(api.ErrorMessage(), "."), s)
}

// beyondEnd says that an object has no bytes where some were asked for.
func beyondEnd(err error) bool {
	return err != nil && (code(err) == "InvalidRange" || status(err) == http.StatusRequestedRangeNotSatisfiable)
}

func innermost(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// withoutURL is the part of an error of a request that does not repeat where it
// went.
func withoutURL(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("broken off before the end")
	}
	return err
}
