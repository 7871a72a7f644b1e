// Package wire translates between the messages of api/ and the types of the
// root package and the contracts: in both directions, losslessly, and in one
// place. It also holds what gateway, node and client must agree on byte by
// byte: the frame format of raw streams, the names of the node's verbs and
// endpoints, and the mapping of error classes to Connect codes.
//
// The formats are described in docs/formats/api.md.
package wire

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
)

// seconds and duration keep zero as zero; a duration beyond what fits, or not
// a number, becomes negative, which every validation refuses.
func seconds(d time.Duration) float64 { return d.Seconds() }

func duration(s float64) time.Duration {
	const most = float64(1<<62) / float64(time.Second)
	if !(s <= most) || s < 0 {
		return -1
	}
	return time.Duration(s * float64(time.Second))
}

// Duration of seconds from the wire.
func Duration(s float64) time.Duration { return duration(s) }

// Seconds for the wire.
func Seconds(d time.Duration) float64 { return seconds(d) }

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func instant(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// Stamp is nil for the zero time.
func Stamp(t time.Time) *timestamppb.Timestamp { return stamp(t) }

// Instant is the zero time for nil.
func Instant(t *timestamppb.Timestamp) time.Time { return instant(t) }
