package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// Checkpoint for the wire.
func Checkpoint(c dsec.Checkpoint) *dsecv1.CheckpointResponse {
	return &dsecv1.CheckpointResponse{Digest: c.Digest, Sandbox: string(c.Sandbox), Time: stamp(c.Time), Until: stamp(c.Until), Spec: Spec(c.Spec), Disk: c.Disk, Memory: c.Memory}
}

// CheckpointFrom the wire.
func CheckpointFrom(p *dsecv1.CheckpointResponse) dsec.Checkpoint {
	return dsec.Checkpoint{Digest: p.GetDigest(), Sandbox: dsec.SandboxID(p.GetSandbox()), Time: instant(p.GetTime()), Until: instant(p.GetUntil()),
		Spec: SpecFrom(p.GetSpec()), Disk: p.GetDisk(), Memory: p.GetMemory()}
}
