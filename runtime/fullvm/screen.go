package fullvm

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"image"
	"image/png"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

const (
	maxPixels = 1 << 24 // of a screen that is looked at: the guest chooses how many it has
	// USB devices are asked every 8 ms or so, and keep 16 events until then.
	paceTime = 20 * time.Millisecond
)

// Screenshot is what the screen shows now, a part of it or all.
func (r *Runtime) Screenshot(ctx context.Context, id dsec.SandboxID, region dsec.Region) (dsec.Picture, error) {
	const op = "take screenshot"
	_, vm, err := r.live(op, id)
	if err != nil {
		return dsec.Picture{}, err
	}
	raw, g, err := capture(ctx, vm)
	if err != nil {
		return dsec.Picture{}, tier.Wrap(op, id, err)
	}
	p, err := picture(raw, g, region)
	return p, tier.Wrap(op, id, err)
}

// capture is the pixels of a screen, three bytes each, line by line.
func capture(ctx context.Context, vm vmm.Desk) ([]byte, geometry, error) {
	fd, err := unix.MemfdCreate("dsec-screen", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, geometry{}, dsec.E(dsec.Internal, "make", "file in memory", os.NewSyscallError("memfd_create", err))
	}
	f := os.NewFile(uintptr(fd), "screen")
	defer func() { _ = f.Close() }()
	if err := vm.Screenshot(ctx, f); err != nil {
		return nil, geometry{}, err
	}
	return readPPM(f)
}

// readPPM reads a binary PPM of 255 colors. The size is the guest's choice.
func readPPM(f io.Reader) ([]byte, geometry, error) {
	b := bufio.NewReaderSize(f, 1<<16)
	var g geometry
	var most int
	var head string
	for range 3 { // pixels follow at once, whatever they are
		line, err := b.ReadString('\n')
		if err != nil || len(line) > 32 {
			return nil, g, dsec.Errorf(dsec.Corrupt, "read", "picture of a screen", "its head: %w", err)
		}
		head += line
	}
	if _, err := fmt.Sscanf(head, "P6\n%d %d\n%d\n", &g.width, &g.height, &most); err != nil {
		return nil, g, dsec.E(dsec.Corrupt, "read", "picture of a screen", err)
	}
	if g.width <= 0 || g.height <= 0 || most != 255 || g.width > maxPixels || g.height > maxPixels/g.width {
		return nil, g, dsec.Errorf(dsec.Unsupported, "read", "picture of a screen", "%d by %d pixels, at most %d in all", g.width, g.height, maxPixels)
	}
	raw := make([]byte, 3*g.width*g.height)
	if _, err := io.ReadFull(b, raw); err != nil {
		return nil, g, dsec.E(dsec.Corrupt, "read", "picture of a screen", err)
	}
	return raw, g, nil
}

func picture(raw []byte, g geometry, r dsec.Region) (dsec.Picture, error) {
	if r == (dsec.Region{}) {
		r = dsec.Region{Width: g.width, Height: g.height}
	}
	if r.X < 0 || r.Y < 0 || r.Width <= 0 || r.Height <= 0 || r.X > g.width || r.Y > g.height || r.Width > g.width-r.X || r.Height > g.height-r.Y {
		return dsec.Picture{}, dsec.Errorf(dsec.Invalid, "cut picture", fmt.Sprintf("%d,%d %dx%d", r.X, r.Y, r.Width, r.Height), "the screen has %d by %d pixels", g.width, g.height)
	}
	img := image.NewNRGBA(image.Rect(0, 0, r.Width, r.Height))
	for y := range r.Height {
		from := raw[3*((r.Y+y)*g.width+r.X):]
		to := img.Pix[y*img.Stride:]
		for x := range r.Width {
			copy(to[4*x:], from[3*x:3*x+3])
			to[4*x+3] = 0xff
		}
	}
	var out bytes.Buffer
	enc := png.Encoder{CompressionLevel: png.BestSpeed}
	if err := enc.Encode(&out, img); err != nil {
		return dsec.Picture{}, dsec.E(dsec.Internal, "encode", "picture of a screen", err)
	}
	return dsec.Picture{PNG: out.Bytes(), Region: r, Width: g.width, Height: g.height}, nil
}

// Act does one action after the other.
func (r *Runtime) Act(ctx context.Context, id dsec.SandboxID, actions []dsec.ScreenAction) error {
	const op = "act on screen"
	if len(actions) > dsec.MaxScreenActions {
		return dsec.Errorf(dsec.Invalid, op, string(id), "%d actions, at most %d", len(actions), dsec.MaxScreenActions)
	}
	sb, vm, err := r.live(op, id)
	if err != nil {
		return err
	}
	if sb.IsPaused() {
		return dsec.Errorf(dsec.IllegalState, op, string(id), "it is paused")
	}
	for _, a := range actions {
		if err := a.Validate(); err != nil {
			return err
		}
		if err := act(ctx, vm, a); err != nil {
			return tier.Wrap(op, id, err)
		}
	}
	return nil
}

// act does one. Once begun it comes to its end, so that no key or button stays down.
func act(ctx context.Context, vm vmm.Desk, a dsec.ScreenAction) error {
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), "act on", "screen", context.Cause(ctx))
	}
	g := geometry{}
	if a.Kind != dsec.ScreenKeys && a.Kind != dsec.ScreenText {
		var err error
		if _, g, err = capture(ctx, vm); err != nil {
			return err
		}
	}
	moments, err := g.moments(a)
	if err != nil {
		return err
	}
	down := map[vmm.Input]bool{}
	defer func() { // what was left out by an error is let go
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		for in := range down {
			in.Down = false
			_ = vm.Input(late, []vmm.Input{in})
		}
	}()
	for _, m := range moments {
		if err := vm.Input(ctx, m); err != nil {
			return err
		}
		for _, in := range m {
			held := in
			held.Down = true
			if in.Down {
				down[held] = true
			} else {
				delete(down, held)
			}
		}
		if err := within.Sleep(ctx, paceTime); err != nil {
			return dsec.E(dsec.ClassOf(err), "act on", "screen", err)
		}
	}
	return nil
}

// Power presses a button of the machine.
func (r *Runtime) Power(ctx context.Context, id dsec.SandboxID, p dsec.Power) error {
	const op = "switch power"
	_, vm, err := r.live(op, id)
	if err != nil {
		return err
	}
	switch p {
	case dsec.PowerButton:
		return tier.Wrap(op, id, vm.PowerButton(ctx))
	case dsec.PowerReset:
		return tier.Wrap(op, id, vm.Reset(ctx))
	}
	return dsec.Errorf(dsec.Invalid, op, dsec.Quote(string(p)), "button or reset")
}

// Console is the end of what came from the serial port, since this process has the sandbox.
func (r *Runtime) Console(_ context.Context, id dsec.SandboxID) ([]byte, error) {
	sb, vm, err := r.live("read console", id)
	if err != nil {
		return nil, err
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return appendConsole(sb.said, vm.Console()), nil
}

// maxConsole bounds what is kept of machines that were there before.
const maxConsole = 64 << 10

func appendConsole(said, more []byte) []byte {
	all := append(bytes.Clone(said), more...)
	return all[max(0, len(all)-4*maxConsole):]
}
