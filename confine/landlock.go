package confine

// Accesses of landlock, by the kernel's numbers (LANDLOCK_ACCESS_FS_*).
const (
	accessExecute   = 1 << 0
	accessWriteFile = 1 << 1
	accessRefer     = 1 << 13
	accessTruncate  = 1 << 14

	// accessChange is all that changes what is in a directory: removing, and making
	// of each kind.
	accessChange = 0x1ff0
	accessWrite  = accessWriteFile | accessTruncate | accessChange
)

// Versions of landlock's interface that rules need.
const (
	LandlockExecute = 2 // with links and renames between directories
	LandlockWrite   = 3 // with truncation
)

// PathRules are what a command may do to files, beside what their modes say:
// of the accesses that are handled only what a rule gives at and below its path.
type PathRules struct {
	Handled uint64
	Rules   []PathRule
	Needs   int // version of landlock's interface
}

// PathRule gives accesses at and below an absolute path.
type PathRule struct {
	Access uint64
	Path   string
}

// Paths makes rules of two lists; an empty one restricts nothing, and nil is
// returned for two such. With writable, files are written, made, removed and
// truncated only at and below those, /dev (with /dev/shm) and, if they are there,
// files of /proc. With executables, only those files and what is in those
// directories are started: the interpreter of a script and the loader of a program
// have to be among them, too.
func Paths(writable, executables []string) *PathRules {
	if len(writable) == 0 && len(executables) == 0 {
		return nil
	}
	// Without this the kernel refuses every rename from one directory to another.
	p := &PathRules{Handled: accessRefer, Rules: []PathRule{{accessRefer, "/"}}, Needs: LandlockExecute}
	if len(writable) > 0 {
		p.Handled, p.Needs = p.Handled|accessWrite, LandlockWrite
		p.Rules = append(p.Rules, PathRule{accessWrite, "/dev"}, PathRule{accessWriteFile | accessTruncate, "/proc"})
		for _, w := range writable {
			p.Rules = append(p.Rules, PathRule{accessWrite, w})
		}
	}
	if len(executables) > 0 {
		p.Handled |= accessExecute
		for _, e := range executables {
			p.Rules = append(p.Rules, PathRule{accessExecute, e})
		}
	}
	return p
}
