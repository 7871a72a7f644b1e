package diskpool

import (
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// TestAReadOnlyPoolIsFoundAgain: what is in it must be seen by whoever ends it.
func TestAReadOnlyPoolIsFoundAgain(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("pools are made by root only; uid is", os.Getuid())
	}
	k := linux.NewKeeper()
	t.Cleanup(k.Close)
	o := Options{Dir: t.TempDir(), Size: 256 << 20, Mechanism: Btrfs, Reserve: 1 << 20, Keeper: k, own: k}
	p := testPool(t, o)
	dir, err := p.Create(t.Context(), "a", 10<<20, Owner{})
	if err != nil {
		t.Fatal(err)
	}
	_ = dir.Close()
	mount, err := k.Get(t.Context(), keeperName)
	if err != nil {
		t.Fatal(err)
	}
	// As the kernel does it after an I/O error, for one mount of it.
	err = unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	_ = mount.Close()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if names, err := again.List(t.Context()); err != nil || !slices.Equal(names, []string{"a"}) {
		t.Errorf("%v, %v", names, err)
	}
	if _, err := again.Space(t.Context()); dsec.ClassOf(err) != dsec.Unavailable || !errors.Is(err, ErrFailed) {
		t.Errorf("space: %v", err)
	}
	if err := again.Remove(t.Context(), "a"); dsec.ClassOf(err) != dsec.Unavailable {
		t.Errorf("remove: %v", err)
	}
	if _, err := again.Create(t.Context(), "b", 10<<20, Owner{}); dsec.ClassOf(err) != dsec.Unavailable {
		t.Errorf("create: %v", err)
	}
}
