package wire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// codes is the one mapping of classes to the wire. The class in the detail is
// what programs decide on; the code serves generic clients and HTTP.
var codes = map[dsec.Class]connect.Code{
	dsec.Invalid:           connect.CodeInvalidArgument,
	dsec.NotFound:          connect.CodeNotFound,
	dsec.AlreadyExists:     connect.CodeAlreadyExists,
	dsec.Conflict:          connect.CodeAborted,
	dsec.IllegalState:      connect.CodeFailedPrecondition,
	dsec.SandboxGone:       connect.CodeFailedPrecondition,
	dsec.Timeout:           connect.CodeDeadlineExceeded,
	dsec.Canceled:          connect.CodeCanceled,
	dsec.PermissionDenied:  connect.CodePermissionDenied,
	dsec.Unauthenticated:   connect.CodeUnauthenticated,
	dsec.ResourceExhausted: connect.CodeResourceExhausted,
	dsec.NoSpace:           connect.CodeResourceExhausted,
	dsec.OutputLimit:       connect.CodeOutOfRange,
	dsec.Unsupported:       connect.CodeUnimplemented,
	dsec.Unavailable:       connect.CodeUnavailable,
	dsec.Corrupt:           connect.CodeDataLoss,
	dsec.FileNotFound:      connect.CodeNotFound,
	dsec.IsADirectory:      connect.CodeFailedPrecondition,
	dsec.NotADirectory:     connect.CodeFailedPrecondition,
	dsec.FileExists:        connect.CodeAlreadyExists,
	dsec.Internal:          connect.CodeInternal,
}

// bare gives the class of an error that came without a detail: from a proxy in
// between, or from the RPC library itself.
var bare = map[connect.Code]dsec.Class{
	connect.CodeInvalidArgument:    dsec.Invalid,
	connect.CodeNotFound:           dsec.NotFound,
	connect.CodeAlreadyExists:      dsec.AlreadyExists,
	connect.CodeAborted:            dsec.Conflict,
	connect.CodeFailedPrecondition: dsec.IllegalState,
	connect.CodeDeadlineExceeded:   dsec.Timeout,
	connect.CodeCanceled:           dsec.Canceled,
	connect.CodePermissionDenied:   dsec.PermissionDenied,
	connect.CodeUnauthenticated:    dsec.Unauthenticated,
	connect.CodeResourceExhausted:  dsec.Invalid, // the library's own size caps; ours carry a detail
	connect.CodeOutOfRange:         dsec.Invalid,
	connect.CodeUnimplemented:      dsec.Unsupported,
	connect.CodeUnavailable:        dsec.Unavailable,
	connect.CodeDataLoss:           dsec.Corrupt,
}

// Code returns the Connect code of a class.
func Code(c dsec.Class) connect.Code {
	if code, ok := codes[c]; ok {
		return code
	}
	return connect.CodeInternal
}

// Remote is the cause of an error that came over the wire; it keeps what the
// detail said beyond class, operation and object.
type Remote struct {
	Message    string
	Result     *dsec.Result  // how the sandbox ended, where known
	RetryAfter time.Duration // 0: not said
}

func (r *Remote) Error() string { return r.Message }

// ResultOf returns the end of the sandbox that err tells of, or nil.
func ResultOf(err error) *dsec.Result {
	if r, ok := errors.AsType[*Remote](err); ok {
		return r.Result
	}
	return nil
}

// Detail translates any error.
func Detail(err error) *dsecv1.ErrorDetail {
	if err == nil {
		return nil
	}
	class := dsec.ClassOf(err)
	d := &dsecv1.ErrorDetail{Class: string(class), Retryable: class.Retryable()}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		d.Op, d.Object = e.Op, e.Object
		if e.Err != nil {
			d.Message = e.Err.Error()
		}
	} else {
		d.Message = err.Error()
	}
	if r, ok := errors.AsType[*Remote](err); ok {
		d.Result = Result(r.Result)
		d.RetryAfter = seconds(r.RetryAfter)
	}
	return d
}

// Err translates back; a nil detail is no error.
func Err(d *dsecv1.ErrorDetail) error {
	if d == nil {
		return nil
	}
	class := dsec.Class(d.Class)
	if _, ok := codes[class]; !ok {
		class = dsec.Internal
	}
	var cause error
	if d.Message != "" || d.Result != nil || d.RetryAfter > 0 {
		cause = &Remote{Message: d.Message, Result: ResultFrom(d.Result), RetryAfter: duration(d.RetryAfter)}
	}
	return dsec.E(class, d.Op, d.Object, cause)
}

// WithResult adds how the sandbox ended to err.
func WithResult(err error, r *dsec.Result) error {
	if r == nil || ResultOf(err) != nil {
		return err
	}
	d := Detail(err)
	d.Result = Result(r)
	return Err(d)
}

// ConnectError translates err for a Connect handler; nil stays nil.
func ConnectError(err error) error {
	if err == nil {
		return nil
	}
	d := Detail(err)
	ce := connect.NewError(Code(dsec.Class(d.Class)), errors.New(text(d)))
	if detail, derr := connect.NewErrorDetail(d); derr == nil {
		ce.AddDetail(detail)
	}
	return ce
}

func text(d *dsecv1.ErrorDetail) string {
	if d.Op == "" {
		return d.Message
	}
	return Err(d).Error()
}

// FromConnect translates what a Connect client returned. op is used where the
// error carries no detail.
func FromConnect(op string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return dsec.E(transportClass(err), op, "", err)
	}
	for _, d := range ce.Details() {
		if m, derr := d.Value(); derr == nil {
			if detail, ok := m.(*dsecv1.ErrorDetail); ok {
				return Err(detail)
			}
		}
	}
	class, known := bare[ce.Code()]
	if !known {
		class = transportClass(err)
	}
	cause := errors.Unwrap(ce) // its text is the message
	if cause == nil {
		cause = errors.New(ce.Message())
	}
	return dsec.E(class, op, "", cause)
}

// transportClass: what is no error of ours came from the transport.
func transportClass(err error) dsec.Class {
	if c := dsec.ClassOf(err); c != dsec.Internal {
		return c
	}
	return dsec.Unavailable
}

// jsonError is an error as Connect writes it in JSON.
type jsonError struct {
	Code    string       `json:"code"`
	Message string       `json:"message,omitempty"`
	Details []jsonDetail `json:"details,omitempty"`
}

type jsonDetail struct {
	Type  string          `json:"type"`
	Value string          `json:"value"`
	Debug json.RawMessage `json:"debug,omitempty"`
}

type jsonEnd struct {
	Error *jsonError `json:"error,omitempty"`
}

func toJSON(err error) *jsonError {
	if err == nil {
		return nil
	}
	d := Detail(err)
	je := &jsonError{Code: Code(dsec.Class(d.Class)).String(), Message: text(d)}
	raw, merr := proto.Marshal(d)
	if merr != nil {
		return je
	}
	detail := jsonDetail{Type: "dsec.v1.ErrorDetail", Value: base64.RawStdEncoding.EncodeToString(raw)}
	if debug, merr := protojson.Marshal(d); merr == nil {
		detail.Debug = debug
	}
	je.Details = []jsonDetail{detail}
	return je
}

func (je *jsonError) err(op string) error {
	for _, d := range je.Details {
		raw, err := base64.RawStdEncoding.DecodeString(d.Value)
		detail := &dsecv1.ErrorDetail{}
		if d.Type == "dsec.v1.ErrorDetail" && err == nil && proto.Unmarshal(raw, detail) == nil {
			return Err(detail)
		}
	}
	var code connect.Code
	class := dsec.Internal
	if code.UnmarshalText([]byte(je.Code)) == nil {
		if c, ok := bare[code]; ok {
			class = c
		}
	}
	return dsec.E(class, op, "", errors.New(je.Message))
}

// HTTPError reads the JSON body of a failed raw request.
func HTTPError(op string, status int, body []byte) error {
	je := &jsonError{}
	if json.Unmarshal(body, je) == nil && je.Code != "" {
		return je.err(op)
	}
	class := dsec.Internal
	switch {
	case status == 401:
		class = dsec.Unauthenticated
	case status == 403:
		class = dsec.PermissionDenied
	case status == 404:
		class = dsec.NotFound
	case status >= 400 && status < 500:
		class = dsec.Invalid
	case status == 502, status == 503:
		class = dsec.Unavailable
	case status == 504:
		class = dsec.Timeout
	}
	return dsec.E(class, op, "", fmt.Errorf("HTTP status %d", status))
}

// status of an HTTP answer, as Connect maps codes.
func status(c connect.Code) int {
	switch c {
	case connect.CodeCanceled:
		return 499
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeOutOfRange:
		return http.StatusBadRequest
	case connect.CodeDeadlineExceeded:
		return http.StatusGatewayTimeout
	case connect.CodeNotFound:
		return http.StatusNotFound
	case connect.CodeAlreadyExists, connect.CodeAborted:
		return http.StatusConflict
	case connect.CodePermissionDenied:
		return http.StatusForbidden
	case connect.CodeResourceExhausted:
		return http.StatusTooManyRequests
	case connect.CodeUnimplemented:
		return http.StatusNotImplemented
	case connect.CodeUnavailable:
		return http.StatusServiceUnavailable
	case connect.CodeUnauthenticated:
		return http.StatusUnauthorized
	}
	return http.StatusInternalServerError
}

// WriteError answers a raw request with an error in JSON.
func WriteError(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status(Code(dsec.ClassOf(err))))
	_ = json.NewEncoder(w).Encode(toJSON(err)) // the caller went away: nobody to tell
}
