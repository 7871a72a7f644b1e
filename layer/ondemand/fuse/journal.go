package fuse

import (
	"os"

	"github.com/opendsec/dsec/layer/ondemand/journal"
)

// The messages of the kernel are read into a journal.
const (
	slots    = 64
	slotSize = 8 << 10 // what the kernel wants to have room for
)

var shape = journal.Shape{Slots: slots, Size: slotSize}

// NewJournal makes one.
func NewJournal() (*os.File, error) { return journal.New(shape) }
