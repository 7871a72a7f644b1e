package proc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// kept is what outlives this process: a program that runs, and what it writes to.
type kept struct {
	subjects, told, ring *ebpf.Map
	older                bool // an earlier dsec's was there, and is gone with what it had to tell
}

// layout names what the program and its maps agree on.
const layout = "starts2-"

// older are what an earlier dsec may have left, with the same names of its parts.
var older = []string{"starts1-"}

func keptName(c Config, of string) string { return nameIn(layout, c, of) }

func nameIn(layout string, c Config, of string) string {
	return fmt.Sprintf("%s%s-%d-%s", layout, c.Name, c.Base, of)
}

// openKept takes over all of it, or makes all of it, and then ends what is older: who is killed
// between leaves both, and the next one still learns that there was an older one.
func openKept(ctx context.Context, c Config) (*kept, error) {
	k, err := takeOrMake(ctx, c)
	if err != nil {
		return nil, err
	}
	if k.older, err = dropOlder(ctx, c); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

// takeOrMake: the link is kept last: with it there is everything.
func takeOrMake(ctx context.Context, c Config) (*kept, error) {
	k := &kept{}
	l, err := c.Keeper.Get(ctx, keptName(c, "link"))
	if err == nil {
		if err = l.Close(); err == nil {
			err = k.take(ctx, c)
		}
		if err == nil {
			return k, nil
		}
		err = errors.Join(err, k.close())
	}
	if err != nil && !errors.Is(err, dsec.NotFound.Err()) {
		return nil, err
	}
	k = &kept{}
	if err := k.make(ctx, c); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

// dropOlder ends what an earlier dsec left, whose ring this one cannot read, and
// reports whether there was any.
func dropOlder(ctx context.Context, c Config) (bool, error) {
	found, errs := false, []error(nil)
	for _, layout := range older {
		f, err := c.Keeper.Get(ctx, nameIn(layout, c, "link"))
		if errors.Is(err, dsec.NotFound.Err()) {
			err = nil
		} else if err == nil {
			found, err = true, f.Close()
		}
		errs = append(errs, err, drop(ctx, c, layout))
	}
	return found, errors.Join(errs...)
}

func drop(ctx context.Context, c Config, layout string) error {
	errs := []error{c.Keeper.Drop(ctx, nameIn(layout, c, "link"))}
	for name := range (&kept{}).maps() {
		errs = append(errs, c.Keeper.Drop(ctx, nameIn(layout, c, name)))
	}
	return errors.Join(errs...)
}

// Forget ends what an earlier process may have left that looks at processes.
func Forget(ctx context.Context, c Config) error {
	_, err := dropOlder(ctx, c)
	return errors.Join(err, drop(ctx, c, layout))
}

func (k *kept) maps() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{"subjects": &k.subjects, "told": &k.told, "ring": &k.ring}
}

func (k *kept) take(ctx context.Context, c Config) error {
	for name, at := range k.maps() {
		f, err := c.Keeper.Get(ctx, keptName(c, name))
		if err != nil {
			return err
		}
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		if *at, err = ebpf.NewMapFromFD(fd); err != nil {
			return err
		}
	}
	return nil
}

func (k *kept) make(ctx context.Context, c Config) (err error) {
	for at, spec := range map[**ebpf.Map]*ebpf.MapSpec{&k.subjects: subjectsSpec(), &k.told: toldSpec(), &k.ring: ringSpec()} {
		if *at, err = ebpf.NewMap(spec); err != nil {
			return err
		}
	}
	l, err := k.attach(c)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }() // kept, or useless
	for name, at := range k.maps() {
		if err := put(ctx, c, name, (*at).FD()); err != nil {
			return err
		}
	}
	f, ok := l.(interface{ FD() int })
	if !ok {
		return errors.New("the link has no descriptor to keep")
	}
	return put(ctx, c, "link", f.FD())
}

// attach has the program run that tells the most of what this kernel lets be told.
func (k *kept) attach(c Config) (link.Link, error) {
	scratch, err := ebpf.NewMap(scratchSpec())
	if err != nil {
		return nil, err
	}
	defer func() { _ = scratch.Close() }() // the program has it
	m := maps{k.subjects, k.ring, scratch}
	if c.form != byProc {
		o, err := kernelOffsets()
		if err == nil {
			o.open = o.open && c.form != byHelper
			var l link.Link
			if l, err = attach(program(c.Base, m, &o)); err == nil {
				return l, nil
			}
		}
		c.Log.Warn("arguments of programs are read from /proc: the kernel does not let them be told", "err", err)
	}
	return attach(program(c.Base, m, nil))
}

func attach(s *ebpf.ProgramSpec) (link.Link, error) {
	p, err := ebpf.NewProgram(s)
	if err != nil {
		return nil, err
	}
	defer func() { _ = p.Close() }() // the link has it
	if s.Type == ebpf.Tracing {
		return link.AttachTracing(link.TracingOptions{Program: p})
	}
	return link.AttachRawTracepoint(link.RawTracepointOptions{Name: tracepoint, Program: p})
}

func put(ctx context.Context, c Config, name string, fd int) error {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(d), name)
	defer func() { _ = f.Close() }()
	return c.Keeper.Put(ctx, keptName(c, name), f)
}

func (k *kept) close() error {
	var errs []error
	for _, at := range k.maps() {
		if *at != nil {
			errs = append(errs, (*at).Close())
		}
	}
	return errors.Join(errs...)
}

// add has the program tell of a range; an adopted one it may tell of already.
func (k *kept) add(n uint32, adopted bool) error {
	flags := ebpf.UpdateAny
	if adopted {
		flags = ebpf.UpdateNoExist
	} else if err := k.told.Delete(n); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	err := k.subjects.Update(n, make([]byte, subjectSize), flags)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

func (k *kept) remove(n uint32) error {
	var errs []error
	for _, m := range []*ebpf.Map{k.subjects, k.told} {
		if err := m.Delete(n); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// missed is how many starts were not told since it was asked the last time.
func (k *kept) missed(n uint32) (uint64, error) {
	v := make([]byte, subjectSize)
	if err := k.subjects.Lookup(n, &v); err != nil {
		return 0, err
	}
	var told uint64
	if err := k.told.Lookup(n, &told); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, err
	}
	all := binary.NativeEndian.Uint64(v[atMissed:])
	if all <= told {
		return 0, nil
	}
	return all - told, k.told.Update(n, all, ebpf.UpdateAny)
}

// forgetOthers removes ranges that nobody has any more.
func (k *kept) forgetOthers(known func(uint32) bool) error {
	var n uint32
	var v []byte
	var gone []uint32
	all := k.subjects.Iterate()
	for all.Next(&n, &v) {
		if !known(n) {
			gone = append(gone, n)
		}
	}
	errs := []error{all.Err()}
	for _, n := range gone {
		errs = append(errs, k.remove(n))
	}
	return errors.Join(errs...)
}
