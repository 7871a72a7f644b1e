package qemu

import (
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// BenchmarkTiers measures what a machine costs, all in one run and in turn: cold boot and clone up to
// the guest's first word, what of a clone a QEMU that was started ahead would save,
// and the memory of idle machines. Run it with -benchtime 10x.
func BenchmarkTiers(b *testing.B) {
	g := theGuest(b)
	tp := g.template(b)
	var cold, clone, load []time.Duration
	var machines []vmm.VM
	var coldPSS int64
	for range b.N {
		began := time.Now()
		m, err := g.driver.Start(ctxOf(b), g.shape, g.devices(b, "x"))
		if err != nil {
			b.Fatal(err)
		}
		if err := m.(*machine).settle(ctxOf(b), ready, time.Minute); err != nil {
			b.Fatal(err)
		}
		cold = append(cold, time.Since(began))
		if coldPSS, err = m.Memory(); err != nil {
			b.Fatal(err)
		}
		m.Kill()

		dev := g.devices(b, "x")
		began = time.Now()
		if m, err = g.driver.Clone(ctxOf(b), tp, dev); err != nil {
			b.Fatal(err)
		}
		want(b, m, "ping", "pong")
		clone = append(clone, time.Since(began))
		machines = append(machines, m)

		load = append(load, loadAhead(b, g, tp))
	}
	for _, m := range machines {
		defer m.Kill()
	}
	pss, err := machines[len(machines)/2].Memory()
	if err != nil {
		b.Fatal(err)
	}
	ms := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Microseconds()) / 1000
	}
	c, k, l := ms(cold), ms(clone), ms(load)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(c, "cold-ms")
	b.ReportMetric(k, "clone-ms")
	b.ReportMetric(l, "ahead-ms")
	b.ReportMetric(c/k, "cold/clone")
	b.ReportMetric(k/l, "clone/ahead")
	b.ReportMetric(float64(coldPSS)/(1<<20), "coldPSS-MiB")
	b.ReportMetric(float64(pss)/(1<<20), "clonePSS-MiB")
	b.Logf("%d clones; cold %v, clone %v, ahead %v", b.N, cold, clone, load)
}

// BenchmarkKept compares, in turn, a clone that ends with this process with one that the hold
// keeps, both up to the guest's first word, and measures an adoption.
func BenchmarkKept(b *testing.B) {
	h := newHouse(b)
	tp := h.g.template(b)
	var own, kept, adopted []time.Duration
	for range b.N {
		owner := h.child(ownerJob{Do: "run", Name: "y", Template: tp, Devices: h.g.devices(b, "y")})
		owner.wait("there")
		owner.kill()
		d, c := h.next()
		began := time.Now()
		m := h.adopt(d, "y")
		want(b, m, "get", "y")
		adopted = append(adopted, time.Since(began))
		m.Kill()
		for i, name := range []string{"", "", "x"} {
			dev := h.g.devices(b, "x")
			dev.Name = name
			began := time.Now()
			m, err := d.Clone(ctxOf(b), tp, dev)
			if err != nil {
				b.Fatal(err)
			}
			want(b, m, "ping", "pong")
			switch took := time.Since(began); i {
			case 1: // the first reads the template
				own = append(own, took)
			case 2:
				kept = append(kept, took)
			}
			m.Kill()
		}
		_ = c.Close()
	}
	ms := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Microseconds()) / 1000
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(own), "clone-ms")
	b.ReportMetric(ms(kept), "kept-ms")
	b.ReportMetric(ms(kept)/ms(own), "kept/clone")
	b.ReportMetric(ms(adopted), "adopt-ms")
}

// loadAhead is the part of a clone that is left when its QEMU was started before.
func loadAhead(b *testing.B, g guest, tp vmm.Template) time.Duration {
	b.Helper()
	w, err := g.driver.Prepare(ctxOf(b), tp, g.devices(b, "x"))
	if err != nil {
		b.Fatal(err)
	}
	began := time.Now()
	m, err := w.Begin(ctxOf(b))
	if err != nil {
		b.Fatal(err)
	}
	defer m.Kill()
	want(b, m, "ping", "pong")
	return time.Since(began)
}
