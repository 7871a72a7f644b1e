package agent

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A machine with a balloon that reports what is free gives that back to its host. What nobody has
// used for a while is made free here, by what follows.
const (
	// reportOrder is the smallest row of free pages that is reported: 2^2, which are 16 KiB. The
	// kernel's own choice, 2 MiB, leaves most of a page cache that was dropped where it is.
	reportOrder = 2

	reclaimEvery = 5 * time.Second
	reclaimAge   = 4        // rounds without a stall after which what was there all the time is old
	reclaimLeast = 1 << 20  // what is less is not worth it
	reclaimMost  = 64 << 20 // of one round, which is some 0.1 s of work where a processor is emulated
	reclaimKeep  = 4 << 20  // of files, that are always left
	restMost     = 64       // rounds: the longest rest after something was taken that was needed

	// Part of a round that something waited for memory, and for a disk: with more of it the machine is busy.
	stallMemory = reclaimEvery / 200
	stallDisk   = reclaimEvery / 20
)

// kernelFiles are where the kernel says and takes it. A test has others.
type kernelFiles struct{ proc, sys, groups, own string }

var machineFiles = kernelFiles{proc: "/proc", sys: "/sys", groups: "/sys/fs/cgroup", own: ourDir}

// reporting says whether the host takes what is free: it is the balloon's sixth feature.
func (k kernelFiles) reporting() bool {
	const bit = 5 // VIRTIO_BALLOON_F_REPORTING
	found, _ := filepath.Glob(filepath.Join(k.sys, "bus/virtio/drivers/virtio_balloon/virtio*/features"))
	for _, name := range found {
		if b, err := os.ReadFile(name); err == nil && len(b) > bit && b[bit] == '1' {
			return true
		}
	}
	return false
}

func (k kernelFiles) setOrder() error {
	return os.WriteFile(filepath.Join(k.sys, "module/page_reporting/parameters/page_reporting_order"), []byte(strconv.Itoa(reportOrder)), 0)
}

// usage is what is known of the machine's memory at one moment. Times and refaults are of its whole life.
type usage struct {
	files    int64         // bytes of files in memory that can be read again
	refaults int64         // bytes that were taken from memory and needed soon after
	memory   time.Duration // that something waited for memory
	disk     time.Duration // for a disk, or what is like one
}

func (k kernelFiles) usage() (usage, error) {
	var u usage
	page := int64(os.Getpagesize())
	for name, into := range map[string]*int64{"nr_inactive_file": &u.files, "nr_active_file": &u.files, "workingset_refault_file": &u.refaults} {
		n, ok := counter(filepath.Join(k.proc, "vmstat"), name)
		if !ok {
			return u, errors.New("no " + name + " in vmstat")
		}
		*into += n * page
	}
	var err error
	if u.memory, err = stalled(filepath.Join(k.proc, "pressure/memory")); err == nil {
		u.disk, err = stalled(filepath.Join(k.proc, "pressure/io"))
	}
	return u, err
}

// stalled reads how long some task has waited, from a file of pressure stall information.
func stalled(path string) (time.Duration, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if !strings.HasPrefix(line, "some ") {
			continue
		}
		_, total, ok := strings.Cut(line, " total=")
		n, err := strconv.ParseInt(strings.TrimSpace(total), 10, 64)
		if ok && err == nil {
			return time.Duration(n) * time.Microsecond, nil
		}
	}
	return 0, errors.New("no total in " + path)
}

// take gives memory of files back, the longest unused first. Less than was asked for is no error.
func (k kernelFiles) take(n int64) error {
	err := os.WriteFile(filepath.Join(k.groups, "memory.reclaim"), []byte(strconv.FormatInt(n, 10)), 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	return err
}

// aging decides what of a machine's memory is old. It sees one usage in each round.
type aging struct {
	before usage   // the round before
	files  []int64 // bytes in the rounds since the last stall, at most reclaimAge
	taken  int64   // bytes since the last look at refaults
	rest   int     // rounds until the next look
	wait   int     // rounds of the next rest
	primed bool    // before is known
}

// calm says whether anything may be given back now: a machine that waits for memory or for its disk
// is left alone, and one that needed what was taken for a while. Each round asks it once.
func (a *aging) calm(now usage) bool {
	before, primed := a.before, a.primed
	a.before, a.primed = now, true
	switch {
	case !primed:
		return false
	case now.memory-before.memory > stallMemory, now.disk-before.disk > stallDisk:
		a.files = nil
		return false
	}
	if a.taken > 0 && now.refaults-before.refaults > a.taken/8 {
		a.wait = min(max(2*a.wait, reclaimAge), restMost)
		a.rest, a.taken, a.files = a.wait, 0, nil
	}
	if a.rest > 0 {
		a.rest--
		return false
	}
	return true
}

// old is how many bytes are to be given back now, of a calm machine. What was there in each of the last
// rounds is old; half of it goes, so that what the kernel believes to be old is found out to be needed
// before much of it has gone.
func (a *aging) old(now usage) int64 {
	a.files = append(a.files, now.files)
	if len(a.files) < reclaimAge {
		return 0
	}
	a.files = a.files[len(a.files)-reclaimAge:]
	least := now.files
	for _, n := range a.files {
		least = min(least, n)
	}
	n := min((least-reclaimKeep)/2, reclaimMost)
	if n < reclaimLeast {
		a.wait, a.taken = a.wait/2, 0
		return 0
	}
	return n
}

// giveBack has what is old made free, round by round, from when the machine is found to report to
// when ctx ends. It does nothing while the sandbox is frozen, and is in no round when freeze returns.
func (a *Agent) giveBack(ctx context.Context, k kernelFiles) {
	select {
	case <-a.reports:
	case <-ctx.Done():
		return
	}
	defer func() { // it does not go on without anybody who holds it back
		a.starting.Lock()
		defer a.starting.Unlock()
		if err := a.damon.stop(); err != nil {
			a.damon.putAway("the kernel does not stop watching memory", err)
		}
	}()
	var age aging
	tick := time.NewTicker(reclaimEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := a.giveBackOnce(k, &age); err != nil {
			a.log.Warn("nothing but what is free is given back to the host", "err", err)
			return
		}
	}
}

func (a *Agent) giveBackOnce(k kernelFiles, age *aging) error {
	a.starting.RLock()
	defer a.starting.RUnlock()
	a.mu.Lock()
	idle := a.sandbox == nil || a.frozen || !a.resumed
	a.mu.Unlock()
	if idle { // and what it was says nothing of what it will be
		*age = aging{}
		return nil
	}
	now, err := k.usage()
	if err != nil {
		return err
	}
	calm := age.calm(now)
	took := a.damon.round(calm)
	if took > 0 {
		age.taken = took
	}
	if !calm {
		return nil
	}
	n := age.old(now)
	if n == 0 || a.damon.takes(n, took) {
		return nil
	}
	if err := k.take(n); err != nil {
		return err
	}
	age.taken = n
	// What this itself waited for is no pressure.
	age.before, err = k.usage()
	return err
}

// lookForHost looks whether the machine reports, once it does for good, and says how.
func (a *Agent) lookForHost(k kernelFiles) {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-a.reports:
		return
	default:
	}
	if !k.reporting() {
		return
	}
	if err := k.setOrder(); err != nil && !errors.Is(err, fs.ErrNotExist) { // else it is not to be chosen
		a.log.Warn("free memory is reported in large pieces only", "err", err)
	}
	a.damon.look()
	close(a.reports)
}
