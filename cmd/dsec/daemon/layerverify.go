package daemon

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

// verified is what layer verify prints as JSON.
type verified struct {
	Layers  []store.Verified `json:"layers,omitempty"`  // of this machine
	Store   *gc.Checked      `json:"store,omitempty"`   // object storage
	Damaged []gc.Damage      `json:"damaged,omitempty"` // layers of this machine
}

// LayerVerify is the verb that compares what is stored with its digests. It
// reads the directories itself and needs no daemon.
func LayerVerify() *cobra.Command {
	var s settings
	var all, whole bool
	c := &cobra.Command{
		Use:   "verify LAYER... | --all | --store",
		Short: "Compare layers, or all of object storage, with their digests",
		Long: `LAYER and --all read what is on this machine: metadata, and those chunks of the data
that are here. --store reads every object in the object storage of the
configuration and every chunk in it. Prints what is damaged and which layers that
hits, and exits with 1 if anything is. May run beside the daemons.

Where all that is, the configuration says, not the socket: --config, else
` + defaultFile + `, else the defaults. Keys of S3 come from the environment or
from the credentials file.`,
		Example: "  sudo dsec layer verify repo:v1\n  sudo dsec layer verify --all\n  sudo dsec layer verify --store --config /srv/dsec/dsec.yaml -o json",
		RunE: func(c *cobra.Command, refs []string) error {
			if err := s.load(); err != nil {
				return err
			}
			if !all && !whole && len(refs) == 0 || all && len(refs) > 0 {
				return dsec.Errorf(dsec.Invalid, "verify layers", "", "want layers, --all or --store")
			}
			v, err := verifyLayers(c, &s, refs, all)
			if err == nil && whole {
				v.Store, err = verifyStore(c, &s)
			}
			if err != nil {
				return err
			}
			return v.show(c)
		},
	}
	s.register(c)
	c.Flags().BoolVar(&all, "all", false, "every layer of this machine")
	c.Flags().BoolVar(&whole, "store", false, "every object of object storage")
	return c
}

func verifyLayers(c *cobra.Command, s *settings, refs []string, all bool) (v verified, err error) {
	if !all && len(refs) == 0 {
		return v, nil
	}
	look, err := store.Look(s.layerDir())
	if err != nil {
		return v, err
	}
	var list []layer.Digest
	if all {
		if list, err = look.Layers(); err != nil {
			return v, err
		}
	}
	for _, ref := range refs {
		d, err := look.Resolve(dsec.LayerRef(ref))
		if err != nil {
			return v, err
		}
		list = append(list, d)
	}
	for _, d := range list {
		got, err := look.Verify(c.Context(), d)
		switch class := dsec.ClassOf(err); {
		case class == dsec.Corrupt:
			v.Damaged = append(v.Damaged, gc.Damage{Key: string(d), Error: err.Error(), Layers: []layer.Digest{d}})
		case class == dsec.NotFound && all: // it went meanwhile
			continue
		case err != nil:
			return v, err
		}
		v.Layers = append(v.Layers, got)
	}
	return v, nil
}

func verifyStore(c *cobra.Command, s *settings) (*gc.Checked, error) {
	blobs, err := lookBlobs(c.Context(), s)
	if err != nil {
		return nil, err
	}
	defer blobs.Close()
	progress, end := progressed(c.ErrOrStderr(), "verify")
	defer end()
	checked, err := gc.Verify(c.Context(), blobs, gc.VerifyOptions{Progress: progress})
	return &checked, err
}

// show prints, and is an error if anything is damaged.
func (v verified) show(c *cobra.Command) error {
	out := c.OutOrStdout()
	if wantJSON(c) {
		if err := json.NewEncoder(out).Encode(v); err != nil {
			return err
		}
	} else if err := v.print(out); err != nil {
		return err
	}
	n := len(v.Damaged)
	if v.Store != nil {
		n += len(v.Store.Damaged)
	}
	if n > 0 {
		return dsec.Errorf(dsec.Corrupt, "verify layers", "", "%d damaged or missing, see above", n)
	}
	return nil
}

func (v verified) print(w io.Writer) error {
	damaged := map[layer.Digest]bool{}
	for _, d := range v.Damaged {
		damaged[d.Layers[0]] = true
		fmt.Fprintf(w, "damaged: %s: %s\n", d.Key, d.Error)
	}
	for _, l := range v.Layers {
		if !damaged[l.Digest] {
			fmt.Fprintf(w, "good: %s: %d of %d chunks are here\n", l.Digest, l.Chunks, l.Of)
		}
	}
	if v.Store == nil {
		return nil
	}
	for _, d := range v.Store.Damaged {
		fmt.Fprintf(w, "damaged: %s: %s\n", d.Key, d.Error)
		for _, l := range d.Layers {
			fmt.Fprintf(w, "  hits %s\n", l)
		}
	}
	_, err := fmt.Fprintln(w, strings.Join([]string{
		fmt.Sprintf("object storage: %d objects of %s", v.Store.Objects.Objects, sized(v.Store.Objects.Bytes)),
		fmt.Sprintf("%d chunks", v.Store.Chunks), fmt.Sprintf("%d layers", v.Store.Layers), fmt.Sprintf("%d stacks", v.Store.Stacks),
		fmt.Sprintf("%d damaged or missing", len(v.Store.Damaged)), fmt.Sprintf("%d layers hit", len(v.Store.Hit())),
	}, ", "))
	return err
}
