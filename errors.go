package dsec

import (
	"context"
	"errors"
	"fmt"
)

// Class is one of a closed set of error classes. It is what a program decides
// on; the text of an error is for people. The gateway maps a Class to the wire
// once, and libdsec mirrors the set one to one.
type Class string

// The classes. A caller may retry an error only where Retryable says so.
const (
	Invalid           Class = "invalid"            // the request can never succeed as it is
	NotFound          Class = "not_found"          // the named object does not exist
	AlreadyExists     Class = "already_exists"     // the name is taken
	Conflict          Class = "conflict"           // same idempotency key, other parameters; or a lost race
	IllegalState      Class = "illegal_state"      // the object exists but is not in a state that allows this
	SandboxGone       Class = "sandbox_gone"       // the sandbox ended, or ended during the call
	Timeout           Class = "timeout"            // a deadline the caller set has passed; the outcome is unknown
	Canceled          Class = "canceled"           // the caller went away
	PermissionDenied  Class = "permission_denied"  // the principal, or the sandbox user, may not
	Unauthenticated   Class = "unauthenticated"    // no valid key
	ResourceExhausted Class = "resource_exhausted" // a quota or budget is used up; retry later
	NoSpace           Class = "no_space"           // a disk limit: of the sandbox if Object names it
	OutputLimit       Class = "output_limit"       // on_limit="kill" fired
	Unsupported       Class = "unsupported"        // this tier, kernel or machine cannot; the text says what it needs
	Unavailable       Class = "unavailable"        // a part of the platform is away; retry
	Corrupt           Class = "corrupt"            // bytes do not match their digest or format
	FileNotFound      Class = "file_not_found"     // a path inside a sandbox
	IsADirectory      Class = "is_a_directory"     // a path inside a sandbox
	NotADirectory     Class = "not_a_directory"    // a path inside a sandbox
	FileExists        Class = "file_exists"        // a path inside a sandbox
	Internal          Class = "internal"           // a defect of dsec
)

// Classes lists every class, in the order of the declarations.
var Classes = []Class{Invalid, NotFound, AlreadyExists, Conflict, IllegalState, SandboxGone, Timeout, Canceled,
	PermissionDenied, Unauthenticated, ResourceExhausted, NoSpace, OutputLimit, Unsupported, Unavailable, Corrupt,
	FileNotFound, IsADirectory, NotADirectory, FileExists, Internal}

// Retryable reports whether the same call with the same key may succeed later
// without anybody changing anything.
func (c Class) Retryable() bool {
	return c == Unavailable || c == ResourceExhausted || c == Timeout
}

// Error is the one error type that crosses package and process borders. Its
// text is "operation object: cause", innermost cause last.
type Error struct {
	Class  Class
	Op     string // what was tried: "exec", "mount layer", "write file"
	Object string // on what: a sandbox id, a path, a digest; may be empty
	Err    error  // the cause; may be nil
}

// E builds an *Error. cause may be nil; one that says the same of the same is not said twice.
func E(class Class, op, object string, cause error) *Error {
	if same, ok := cause.(*Error); ok && same != nil && same.Class == class && same.Op == op && same.Object == object { //nolint:errorlint // of what it wraps nothing is to be lost
		cause = same.Err
	}
	return &Error{Class: class, Op: op, Object: object, Err: cause}
}

// Errorf builds an *Error whose cause is a formatted text (%w works).
func Errorf(class Class, op, object, format string, args ...any) *Error {
	return &Error{Class: class, Op: op, Object: object, Err: fmt.Errorf(format, args...)}
}

func (e *Error) Error() string {
	s := e.Op
	if e.Object != "" {
		s += " " + e.Object
	}
	if e.Err != nil {
		return s + ": " + e.Err.Error()
	}
	return s + ": " + string(e.Class)
}

func (e *Error) Unwrap() error { return e.Err }

// Is makes errors.Is(err, SomeClass.Err()) work through any wrapping.
func (e *Error) Is(target error) bool {
	c, ok := target.(classError)
	return ok && e.Class == Class(c)
}

type classError Class

func (c classError) Error() string { return string(c) }

// Err returns a sentinel for errors.Is: errors.Is(err, dsec.NotFound.Err()).
func (c Class) Err() error { return classError(c) }

// ClassOf returns the class of err: the outermost *Error decides; context
// errors map to Timeout and Canceled; anything else is Internal; nil is "".
func ClassOf(err error) Class {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Class
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Canceled
	}
	return Internal
}
