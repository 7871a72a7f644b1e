package dsec

// State is where a sandbox is in its life.
//
//	            ┌───────────────────────────────────────────────┐
//	            ▼                                               │
//	pending → creating → running ⇄ paused                       │ explicit
//	                        │        │                          │ start
//	                        ▼        ▼                          │
//	                      stopping ──────→ stopped ──→ starting ┘→ running
//	                                          │
//	                                          ▼
//	                                       deleted
//
// From every state but deleted a sandbox can become failed; from failed only
// deleted. A stopped sandbox keeps its disk until its retention ends. A start
// keeps id, uid range and upper directory and increases the start count.
type State string

// The states.
const (
	Pending  State = "pending"  // accepted, not begun
	Creating State = "creating" // being built
	Running  State = "running"
	Paused   State = "paused"   // frozen: no process runs, memory kept
	Stopping State = "stopping" // processes are being ended
	Stopped  State = "stopped"  // no process; disk kept
	Starting State = "starting" // explicit restart of a stopped sandbox
	Failed   State = "failed"   // ended by something nobody asked for; Result says what
	Deleted  State = "deleted"  // only the record is left
)

// moves is the whole truth about which state may follow which.
var moves = map[State][]State{
	Pending:  {Creating, Failed, Deleted},
	Creating: {Running, Stopping, Failed},
	Running:  {Paused, Stopping, Failed},
	Paused:   {Running, Stopping, Failed},
	Stopping: {Stopped, Failed},
	Stopped:  {Starting, Deleted, Failed},
	Starting: {Running, Stopping, Failed},
	Failed:   {Deleted},
	Deleted:  {},
}

// States lists every state.
var States = []State{Pending, Creating, Running, Paused, Stopping, Stopped, Starting, Failed, Deleted}

// MoveState returns to if a sandbox named object may go from one state to the
// other, else an IllegalState error that names both. Nothing else assigns a
// state.
func MoveState(object string, from, to State) (State, error) {
	for _, s := range moves[from] {
		if s == to {
			return to, nil
		}
	}
	return from, E(IllegalState, "change state of sandbox", object, &MoveError{From: from, To: to})
}

// MoveError is the cause of an illegal move.
type MoveError struct{ From, To State }

func (e *MoveError) Error() string { return "cannot go from " + string(e.From) + " to " + string(e.To) }

// Live reports whether the state holds processes or is on its way there.
func (s State) Live() bool {
	switch s {
	case Pending, Creating, Running, Paused, Stopping, Starting:
		return true
	}
	return false
}

// Final reports whether nothing but Deleted can follow.
func (s State) Final() bool { return s == Failed || s == Deleted }
