package wire

import (
	"io"
	"net/http"

	"github.com/opendsec/dsec"
)

// Verbs of a node: the last part of the subject of a control call, and the
// path of the same call on the data connection.
const (
	VerbCreate         = "create"
	VerbGet            = "get"
	VerbList           = "list"
	VerbStart          = "start"
	VerbStop           = "stop"
	VerbDelete         = "delete"
	VerbPause          = "pause"
	VerbResume         = "resume"
	VerbFork           = "fork"
	VerbCheckpoint     = "checkpoint"
	VerbFindCheckpoint = "find_checkpoint"
	VerbRenew          = "renew"
	VerbSetNetwork     = "set_network"
	VerbEgress         = "egress"
	VerbSetPhase       = "set_phase"
	VerbCommit         = "commit"
	VerbChanges        = "changes"
	VerbGrade          = "grade"
	VerbCall           = "call"
	VerbFindings       = "findings"
	VerbStats          = "stats"
	VerbExec           = "exec"
	VerbWait           = "wait"
	VerbKept           = "kept"
	VerbWriteStdin     = "write_stdin"
	VerbCloseStdin     = "close_stdin"
	VerbSignal         = "signal"
	VerbKill           = "kill"
	VerbResize         = "resize"
	VerbRelease        = "release"
	VerbMux            = "mux"
	VerbStat           = "file_stat"
	VerbListFiles      = "file_list"
	VerbMkdir          = "file_mkdir"
	VerbMove           = "file_move"
	VerbRemove         = "file_remove"
	VerbSetAttr        = "file_set_attr"
	VerbLayers         = "layer_list"
	VerbInspect        = "layer_inspect"
	VerbRemoveRef      = "layer_remove"
	VerbTag            = "layer_tag"
	VerbTemplate       = "layer_template"
	VerbMerge          = "layer_merge"
	VerbTrace          = "layer_trace"
	VerbEvict          = "layer_evict"
	VerbOnDemand       = "layer_on_demand"
	VerbDoctor         = "doctor"
)

// Paths of the data connection. Requests of the streams are messages in the
// body, answers are frames.
const (
	PathCall    = "/call/"    // + verb: NodeCall → NodeReply, for what is large or long
	PathSession = "/session"  // NodeSession → Frame…
	PathOutput  = "/output"   // OutputRequest → OutputResponse…
	PathWatch   = "/watch"    // WatchRequest → WatchResponse…
	PathAudit   = "/audit"    // AuditRequest → AuditResponse…
	PathImport  = "/import"   // ImportRequest → ImportResponse…
	PathBuild   = "/build"    // BuildRequest → ImportResponse…
	PathEnsure  = "/ensure"   // EnsureRequest → EnsureResponse…
	PathExport  = "/export"   // ?ref= → a tar, in frames
	PathRepack  = "/repack"   // RepackRequest → ImportResponse…
	PathMetrics = "/metrics"  // Prometheus text
	PathUpload  = "/upload"   // a tar → ImportResponse…
	PathSandbox = "/sandbox/" // + id + /files, /tree, /stdin/{exec}, /tunnel/{port}
)

// HeaderProject names the caller's project on the data connection; "" sees
// every project.
const HeaderProject = "Dsec-Project"

// TunnelProtocol is the Upgrade token of a byte stream to a port.
const TunnelProtocol = "dsec-tunnel"

// MaxControl is the most bytes of a control call, and half of what its answer
// may have; larger ones
// take the data connection.
const MaxControl = 256 << 10

// Subject of a control call.
func Subject(node dsec.NodeID, verb string) string { return "node." + string(node) + "." + verb }

// Names of the JetStream buckets.
const (
	BucketHeartbeats = "hb"
	BucketNodes      = "nodes"
	BucketConfig     = "cfg"
)

// Inbox is the prefix of the subjects on which a node gets its answers.
func Inbox(node dsec.NodeID) string { return "_INBOX." + string(node) }

// Request is one on a node's data connection.
type Request struct {
	Method  string
	Path    string // with query
	Project string
	Header  http.Header
	Body    io.Reader
	Length  int64 // of Body; 0: unknown
}
