package dsec

import "time"

// EventType names what happened.
type EventType string

// The event types of this version.
const (
	EventState         EventType = "state"           // From and To are set
	EventExecStarted   EventType = "exec_started"    // Exec is set
	EventExecExited    EventType = "exec_exited"     // Exec is set; Detail is the status, Fields have exit_code, signal, wall, oom
	EventOOM           EventType = "oom"             // a process was killed by the memory limit
	EventExpiryWarning EventType = "expiry_warning"  // Detail: which lifetime, when
	EventFiles         EventType = "files"           // a file was written or removed through the API
	EventAdopted       EventType = "adopted"         // the agent restarted and found the sandbox alive
	EventLayerError    EventType = "layer_error"     // a read of one of its layers is EIO for somebody: it is blamed on infra_image, see Blame; Detail says why, Fields have layer and class
	EventNetwork       EventType = "network"         // another network policy is in force; Detail is its mode, Fields have generation
	EventPhase         EventType = "phase"           // another phase is in force; Detail is its name, Fields have generation, from and killed, processes that were ended
	EventDiskError     EventType = "disk_error"      // the file system that its disk lies in failed: it is blamed on infra_disk; Detail says why
	EventRefused       EventType = "network_refused" // its policy refused a packet, some at once and then one a second are told; Detail is like "tcp 203.0.113.7:443" or "dns x.example", Fields have generation, refused, packets so far, and program, the name of who tried, if that is known
	EventRepercussion  EventType = "repercussion"    // damage was done: Detail says to what, Fields have scope ("sandbox", "service" of the node, "node"), by (an Inducer) and, of an end, cause
	EventGraded        EventType = "graded"          // it was graded; Detail is the cause, Fields have where, sandbox and, if there is one, reward
	EventFinding       EventType = "finding"         // it looks like a reward hack: Detail is the title, Fields have class, confidence, count and evidence, see HackFinding; once for each class
	EventNote          EventType = "note"            // anything else worth a line
)

// Event is one thing that happened to one sandbox. Seq counts from 1 for each
// sandbox without gaps.
type Event struct {
	Sandbox SandboxID         `json:"sandbox"`
	Seq     uint64            `json:"seq"`
	Time    time.Time         `json:"time"`
	Type    EventType         `json:"type"`
	From    State             `json:"from,omitempty"`
	To      State             `json:"to,omitempty"`
	Exec    string            `json:"exec,omitempty"`
	Detail  string            `json:"detail,omitempty"`
	Fields  map[string]string `json:"fields,omitempty"`
}

// Step is the time one step of a creation took.
type Step struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"`
}
