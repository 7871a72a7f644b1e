package vm

import "testing"

func TestCgroupV2(t *testing.T) {
	ok := inGuest(t, "github.com/opendsec/dsec/internal/cgroup", "", Job{})
	for _, name := range []string{"TestA23_NprocAndOOM", "TestDeviceWallHoldsAgainstNodesMadeElsewhere", "TestUpdateChangesALivingGroup"} {
		if !ok[name] {
			t.Errorf("%s did not run", name)
		}
	}
}
