package runtime

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
)

// Celler makes cells in a running sandbox: places that one call each is made in, and
// that nothing outlives. See docs/formats/function.md.
type Celler interface {
	// Cells makes a sandbox in which no command ever ran into one of cells, for good.
	// Its root cannot be written any more by what runs in it. An Interpreter that does
	// not start is Invalid, with what it said.
	Cells(ctx context.Context, id dsec.SandboxID, s CellSpec) (Cells, error)
}

// CellSpec is what the cells of a sandbox have in common.
type CellSpec struct {
	UID, GID    uint32
	Loopback    bool         // a network with nothing but itself, new for each; else only AF_UNIX
	Interpreter *Interpreter // nil: none
}

// Interpreter is a program that waits to run snippets: whatever it has done once, none
// has to do again. For each it makes a process in the cell; nothing comes back from there.
type Interpreter struct {
	Programs []string // absolute; the first that is there
	Args     []string // after the name
	Env      []string
}

// Cells are the cells of one sandbox, one at a time.
type Cells interface {
	// Run has what is to be run run in the cell that is there, and ends it. After an error
	// the sandbox is to be destroyed: nobody knows what is in it. With the end of ctx
	// everything in the cell ends.
	Run(ctx context.Context, r CellRun) (CellEnd, error)
	// Settle comes after each Run without an error: it waits until the cell is gone and the
	// next one is there. Only if it is true every process of the call is known to be gone,
	// and with them all they could change; else the sandbox is to be destroyed.
	Settle(ctx context.Context) (clean bool)
	// Close ends what makes the cells.
	Close() error
}

// CellRun is what happens in one cell.
type CellRun struct {
	Compile *CellCommand // before the command; if it fails, that does not run
	Command CellCommand  // without Argv the interpreter runs Payload
	Env     []string
	Files   []CellFile // below the working directory
	Outputs []string   // patterns of files to bring back
	Stdin   []byte
	Payload []byte
	Output  int64 // most bytes of each of stdout and stderr
	Disk    int64 // most bytes in files
	Back    int64 // most bytes of files that come back
}

// CellCommand is one of a cell.
type CellCommand struct {
	Argv []string // the program is looked up in PATH of Env
	Wall time.Duration
	CPU  time.Duration
}

// CellFile is a file of a cell; its path is relative and clean.
type CellFile struct {
	Path string
	Mode uint32
	Data []byte
}

// CellExit is how a command in a cell ended.
type CellExit struct {
	Code     int // 0..255; 128+signal when one ended it
	Signal   int
	Start    error // it could not be started; the rest says nothing
	TimedOut bool  // Wall was over
	Output   bool  // Output was
	Wall     time.Duration
	CPU      time.Duration // of it and all it waited for
	Largest  int64         // bytes of memory of its largest process
}

// CellEnd is how a cell ended.
type CellEnd struct {
	Compile        *CellExit // nil: there was none
	Command        *CellExit // nil: it did not come to it
	Stdout, Stderr []byte    // Stderr has what the compiler said, too
	Files          []CellFile
	FilesLeftOut   bool  // there were more than may come back
	OOM            bool  // the memory limit ended a process
	Peak           int64 // bytes of memory, all together; 0: the kernel does not tell
}
