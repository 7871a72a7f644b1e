package wire

import (
	"math"
	"net/url"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
)

// bounds of a number, both included.
type bounds struct{ least, most float64 }

// Numbers of requests that are not bounded by the defaults below. What a Spec or
// an ExecSpec may hold is said where their Go types are.
var numbers = map[protoreflect.FullName]bounds{
	"dsec.v1.MkdirRequest.mode":     {0, 0o7777},
	"dsec.v1.SetAttrRequest.mode":   {0, 0o7777},
	"dsec.v1.SignalRequest.signal":  {1, 64},
	"dsec.v1.RenewRequest.lifetime": {0, dsec.MaxLifetime.Seconds()},
	"dsec.v1.ChangesRequest.most":   {0, dsec.MaxChanges},
	"dsec.v1.SetAttrRequest.uid":    {0, math.MaxUint32 - 1}, // the last one means none
	"dsec.v1.SetAttrRequest.gid":    {0, math.MaxUint32 - 1},
}

// The bounds of every other number. An offset has room for all that can be
// written, and sums of it do not overflow.
var (
	integers  = bounds{0, MaxOffset}
	durations = bounds{0, 100 * 365 * 24 * 3600}
)

// Lengths of strings and bytes that are not what is usual.
var lengths = map[protoreflect.FullName]int{
	"dsec.v1.WriteStdinRequest.data": 1 << 20,
	"dsec.v1.ImportRequest.source":   dsec.MaxPathBytes + 1, "dsec.v1.BuildRequest.source": dsec.MaxPathBytes + 1,
	"dsec.v1.BuildRequest.at":  dsec.MaxPathBytes,
	"dsec.v1.StatRequest.path": dsec.MaxPathBytes, "dsec.v1.ListFilesRequest.path": dsec.MaxPathBytes,
	"dsec.v1.MkdirRequest.path": dsec.MaxPathBytes, "dsec.v1.RemoveFileRequest.path": dsec.MaxPathBytes,
	"dsec.v1.MoveRequest.from": dsec.MaxPathBytes, "dsec.v1.MoveRequest.to": dsec.MaxPathBytes,
	"dsec.v1.SetAttrRequest.path": dsec.MaxPathBytes, "dsec.v1.WatchRequest.path": dsec.MaxPathBytes,
	"dsec.v1.Scrub.patterns":       dsec.MaxPathBytes,
	"dsec.v1.GradeRequest.command": dsec.MaxGradeWord, "dsec.v1.GradeRequest.paths": dsec.MaxPathBytes, "dsec.v1.GradeRequest.verify": dsec.MaxPathBytes,
	"dsec.v1.GradeRequest.exclude": dsec.MaxPathBytes, "dsec.v1.GradeRequest.workdir": dsec.MaxPathBytes,
	"dsec.v1.GradeFile.path": dsec.MaxPathBytes, "dsec.v1.GradeFile.data": dsec.MaxGradeFiles,
}

// Counts of lists that may be longer than is usual.
var counts = map[protoreflect.FullName]int{
	"dsec.v1.CreateManyRequest.specs": 10_000,
	"dsec.v1.EventFilter.sandboxes":   10_000,
	"dsec.v1.Scrub.patterns":          dsec.MaxScrubPatterns, "dsec.v1.Scrub.answers": dsec.MaxScrubAnswers,
	"dsec.v1.GradeRequest.command": 1024, "dsec.v1.GradeRequest.env": 256, "dsec.v1.GradeRequest.exclude": dsec.MaxScrubPatterns,
	"dsec.v1.SubscribeRequest.execs": 1000, "dsec.v1.UnsubscribeRequest.execs": 10_000, "dsec.v1.AckRequest.acks": 10_000,
	"dsec.v1.MuxCall.subscribe": 1000, "dsec.v1.MuxCall.unsubscribe": 10_000, "dsec.v1.MuxCall.acks": 10_000,
}

// What is usual.
const (
	usualLength = dsec.MaxKeyBytes
	usualCount  = 64 // of a list, and of a map
)

// checkText holds a string of a request against a most, which is 0 for the
// usual one. No string has a NUL.
func checkText(path, s string, most int) error {
	if most == 0 {
		most = usualLength
	}
	if len(s) > most {
		return badField(path, "%d bytes, at most %d", len(s), most)
	}
	if strings.Contains(s, "\x00") {
		return badField(path, "%s holds a NUL byte", dsec.Quote(s))
	}
	return nil
}

// MaxOffset of a stream of bytes.
const MaxOffset = 1 << 60

// Check reports the first field of a request that is too long, or that no call
// can mean, as an Invalid error that names the field. Spec and ExecSpec are passed
// over, and a CallRequest: they have a Validate each, and one bad item of a CreateMany fails only
// itself.
func Check(m proto.Message) error { return checkMessage("", m.ProtoReflect()) }

func checkMessage(path string, m protoreflect.Message) (err error) {
	if t, ok := m.Interface().(*timestamppb.Timestamp); ok {
		if !t.IsValid() {
			return badField(path, "not a time")
		}
		return nil
	}
	switch m.Descriptor().FullName() {
	case "dsec.v1.Spec", "dsec.v1.ExecSpec", "dsec.v1.CallRequest":
		return nil
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		err = checkField(strings.TrimPrefix(path+"."+string(f.Name()), "."), f, v)
		return err == nil
	})
	return err
}

func badField(path, format string, args ...any) error {
	return dsec.Errorf(dsec.Invalid, "check request", path, format, args...)
}

func checkField(path string, f protoreflect.FieldDescriptor, v protoreflect.Value) (err error) {
	most, own := counts[f.FullName()]
	if !own {
		most = usualCount
	}
	switch {
	case f.IsList():
		if n := v.List().Len(); n > most {
			return badField(path, "%d of them, at most %d", n, most)
		}
		for i := range v.List().Len() {
			if err := checkValue(path, f, v.List().Get(i)); err != nil {
				return err
			}
		}
		return nil
	case f.IsMap():
		if n := v.Map().Len(); n > most {
			return badField(path, "%d of them, at most %d", n, most)
		}
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool { // of strings, all of them
			err = checkText(path, k.String()+v.String(), dsec.MaxLabelBytes)
			return err == nil
		})
		return err
	}
	return checkValue(path, f, v)
}

func checkValue(path string, f protoreflect.FieldDescriptor, v protoreflect.Value) error {
	b, own := numbers[f.FullName()]
	if !own {
		b = integers
	}
	var n float64
	switch f.Kind() {
	case protoreflect.StringKind:
		return checkText(path, v.String(), lengths[f.FullName()])
	case protoreflect.BytesKind:
		if n := len(v.Bytes()); n > lengths[f.FullName()] {
			return badField(path, "%d bytes, at most %d", n, lengths[f.FullName()])
		}
		return nil
	case protoreflect.MessageKind:
		return checkMessage(path, v.Message())
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		n = v.Float()
		if !own {
			b = durations
		}
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		n = float64(v.Int())
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		n = float64(v.Uint())
	default:
		return nil
	}
	if !(n >= b.least && n <= b.most) { // so that NaN is refused
		return badField(path, "%g, want %g to %g", n, b.least, b.most)
	}
	return nil
}

// paths are the parameters of raw requests that name one.
var paths = map[string]bool{"path": true, "at": true, "glob": true}

const maxGlobs = 1000

// CheckQuery holds the parameters of a raw request against the same caps.
func CheckQuery(q url.Values) error {
	for name, values := range q {
		most := 0
		if paths[name] {
			most = dsec.MaxPathBytes
		}
		if len(values) > maxGlobs {
			return badField(name, "%d of them, at most %d", len(values), maxGlobs)
		}
		for _, v := range values {
			if err := checkText(name, v, most); err != nil {
				return err
			}
		}
	}
	return nil
}
