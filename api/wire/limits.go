package wire

import (
	"math"
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
	"dsec.v1.MkdirRequest.mode":         {0, 0o7777},
	"dsec.v1.SetAttrRequest.mode":       {0, 0o7777},
	"dsec.v1.SignalRequest.signal":      {1, 64},
	"dsec.v1.RenewRequest.lifetime":     {0, 30 * 24 * 3600},
	"dsec.v1.CreateKeyRequest.lifetime": {0, 100 * 365 * 24 * 3600},
	"dsec.v1.SetAttrRequest.uid":        {0, math.MaxUint32 - 1}, // the last one means none
	"dsec.v1.SetAttrRequest.gid":        {0, math.MaxUint32 - 1},
}

// The bounds of every other number. An offset has room for all that can be
// written, and sums of it do not overflow.
var (
	integers  = bounds{0, MaxOffset}
	durations = bounds{0, 100 * 365 * 24 * 3600}
)

// MaxOffset of a stream of bytes.
const MaxOffset = 1 << 60

// Check reports the first number of a request that no call can mean, as an
// Invalid error that names the field. Spec and ExecSpec are passed over: they
// have a Validate each, and one bad item of a CreateMany fails only itself.
func Check(m proto.Message) error { return checkMessage("", m.ProtoReflect()) }

func checkMessage(path string, m protoreflect.Message) (err error) {
	switch v := m.Interface().(type) {
	case *timestamppb.Timestamp:
		if !v.IsValid() {
			return badField(path, "not a time")
		}
		return nil
	}
	switch m.Descriptor().FullName() {
	case "dsec.v1.Spec", "dsec.v1.ExecSpec":
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
	switch {
	case f.IsList():
		for i := range v.List().Len() {
			if err := checkValue(path, f, v.List().Get(i)); err != nil {
				return err
			}
		}
		return nil
	case f.IsMap():
		return nil // of strings, all of them
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
