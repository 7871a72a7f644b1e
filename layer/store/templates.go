package store

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Template says what to bind a name to.
type Template struct {
	Image     dsec.LayerRef
	Workspace dsec.LayerRef   // "": none
	Toolkits  []dsec.LayerRef // the lowest first
}

// Bind makes a stack of what the parts of a template mean now and points the
// name to it. A name that was bound is bound anew: who runs keeps what he has,
// and nothing is built.
func (s *Store) Bind(ctx context.Context, name string, t Template) (layer.Info, error) {
	const op = "create template"
	if name == "" {
		return layer.Info{}, dsec.Errorf(dsec.Invalid, op, "", "a template needs a name")
	}
	if err := s.checkTag(name); err != nil {
		return layer.Info{}, err
	}
	if t.Image == "" {
		return layer.Info{}, dsec.Errorf(dsec.Invalid, op, name, "an image is required")
	}
	refs, roles := []dsec.LayerRef{t.Image}, []layer.Role{layer.RoleBase}
	if t.Workspace != "" {
		refs, roles = append(refs, t.Workspace), append(roles, layer.RoleWorkspace)
	}
	for _, ref := range t.Toolkits {
		refs, roles = append(refs, ref), append(roles, layer.RoleToolkit)
	}
	role := map[dsec.LayerRef]layer.Role{}
	for i, ref := range refs {
		if len(ref) > dsec.MaxRefBytes {
			return layer.Info{}, dsec.Errorf(dsec.Invalid, op, name, "a reference of %d bytes, at most %d", len(ref), dsec.MaxRefBytes)
		}
		role[ref] = roles[i]
	}
	parts, config, err := s.Flatten(ctx, refs)
	if err != nil {
		return layer.Info{}, err
	}
	for i := range parts {
		parts[i].Role = role[parts[i].Ref]
	}
	return s.PutStack(ctx, layer.Stack{Layers: parts, Config: &config}, "template "+name, name)
}
