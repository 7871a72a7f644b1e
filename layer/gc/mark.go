package gc

import (
	"maps"
	"slices"
	"strings"

	"github.com/opendsec/dsec/layer"
)

// mark finds what is kept and what may not be deleted.
func (p *pass) mark() {
	p.kept, p.live = map[string]bool{}, map[string]bool{}
	for key := range p.roots {
		p.world.reach(p.kept, key)
	}
	p.live = maps.Clone(p.kept)
	for key, o := range p.world.objects {
		if p.young(o) {
			p.world.reach(p.live, key)
		}
	}
	// What is there and stays needs what it names, kept or not: so nothing is ever
	// there without what it needs.
	p.needed = maps.Clone(p.live)
	for key := range p.world.needs {
		if !p.due[key] {
			p.world.reach(p.needed, key)
		}
	}
	for key := range p.world.broken {
		if p.live[key] {
			p.report.Damaged = append(p.report.Damaged, Damage{Key: key, Error: p.world.broken[key].Error(), Layers: p.world.layersOf(key)})
		}
	}
	slices.SortFunc(p.report.Damaged, byKey)
	missing := map[string]bool{}
	for key := range p.kept {
		for _, need := range p.world.needs[key] {
			if _, ok := p.world.objects[need]; !ok {
				missing[need] = true
			}
		}
	}
	p.report.Missing = slices.Sorted(maps.Keys(missing))
}

// doomed says whether this run deletes an object.
func (p *pass) doomed(key string) bool {
	_, there := p.world.objects[key]
	return there && p.due[key] && !p.needed[key]
}

// stays says whether an object is there after this run.
func (p *pass) stays(key string) bool {
	_, there := p.world.objects[key]
	return there && !p.doomed(key)
}

// guilty says whether an object is to be condemned.
func (p *pass) guilty(key string) bool {
	return !p.live[key] && !p.waiting[key] && !p.doomed(key)
}

// tell counts.
func (p *pass) tell() {
	for _, kind := range layer.Kinds {
		row := Row{Kind: string(kind)}
		for key, o := range p.world.objects {
			if k, _, err := layer.ParseKey(key); err != nil || k != kind {
				continue
			}
			row.All.add(o.size)
			switch {
			case p.kept[key]:
				row.Kept.add(o.size)
			case p.live[key]:
				row.Young.add(o.size)
			case p.doomed(key):
				row.Delete.add(o.size)
			case p.waiting[key]:
				row.Waiting.add(o.size)
			default:
				row.Condemn.add(o.size)
			}
		}
		p.report.Rows = append(p.report.Rows, row)
	}
	for _, kind := range weakKinds {
		row := Row{Kind: kind}
		for _, o := range p.world.weak[kind] {
			row.All.add(o.size)
		}
		for _, key := range p.weak {
			if o, ok := p.world.weak[kind][key]; ok {
				row.Delete.add(o.size)
			}
		}
		p.report.Rows = append(p.report.Rows, row)
	}
	p.report.Dead, p.report.Unknown = p.dead(), p.world.unknown
}

// layersOf finds the layers that need an object.
func (w *world) layersOf(key string) []layer.Digest {
	var out []layer.Digest
	for from := range w.objects {
		kind, d, err := layer.ParseKey(from)
		if err != nil || kind != layer.KindManifest && kind != layer.KindCheckpoint {
			continue
		}
		seen := map[string]bool{}
		if w.reach(seen, from); seen[key] {
			out = append(out, d)
		}
	}
	slices.Sort(out)
	return out
}

func byKey(a, b Damage) int { return strings.Compare(a.Key, b.Key) }
