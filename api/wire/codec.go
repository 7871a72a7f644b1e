package wire

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// JSON is the Connect codec for JSON: it writes the field names of the .proto
// files, and reads those and lowerCamelCase; unknown fields are ignored, so
// that newer clients may talk to older servers.
type JSON struct{}

// Name of the codec in content types.
func (JSON) Name() string { return "json" }

// Marshal a proto.Message.
func (JSON) Marshal(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("marshal %T: not a message", v)
	}
	return protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
}

// Unmarshal into a proto.Message. An empty body is an empty message.
func (JSON) Unmarshal(p []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("unmarshal %T: not a message", v)
	}
	if len(p) == 0 {
		return nil
	}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(p, m)
}
