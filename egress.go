package dsec

import "time"

// Egress is what a sandbox has reached and what it was refused, since it began.
type Egress struct {
	// Rows are what went by name to ports 80 and 443, one for each name, address, port and
	// reason of a refusal. They are bounded: what is too much is in rows without
	// an address.
	Rows []EgressRow `json:"rows"`

	// All packets, whatever opened them.
	PacketsOut     int64 `json:"packets_out"`
	BytesOut       int64 `json:"bytes_out"` // with the headers of packets
	PacketsIn      int64 `json:"packets_in"`
	PacketsRefused int64 `json:"packets_refused"`
}

// EgressRow counts connections to one place.
type EgressRow struct {
	Name        string    `json:"name,omitempty"` // as the sandbox said it
	Address     string    `json:"address,omitempty"`
	Port        uint16    `json:"port,omitempty"`
	Refused     string    `json:"refused,omitempty"` // why; "": they were let through
	Connections int64     `json:"connections"`
	BytesOut    int64     `json:"bytes_out"` // that the sandbox has sent
	BytesIn     int64     `json:"bytes_in"`
	Last        time.Time `json:"last"` // when something was sent, or refused
}
