package gateway

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
)

// system is the service of that name.
type system struct{ *Gateway }

func (s *system) Info(ctx context.Context, _ *dsecv1.InfoRequest) (*dsecv1.InfoResponse, error) {
	p := principal(ctx)
	return &dsecv1.InfoResponse{Version: s.cfg.Version, Principal: p.Name, Project: p.Project, Role: string(p.Role),
		Live: int32(s.cfg.Cluster.Live(p.Project)), Quota: int32(s.cfg.MaxLive)}, nil
}

func (s *system) Nodes(context.Context, *dsecv1.NodesRequest) (*dsecv1.NodesResponse, error) {
	return &dsecv1.NodesResponse{Nodes: s.cfg.Cluster.Nodes()}, nil
}

func (s *system) Doctor(ctx context.Context, req *dsecv1.DoctorRequest) (*dsecv1.DoctorResponse, error) {
	node := dsec.NodeID(req.Node)
	if req.Node == "" {
		nodes := s.cfg.Cluster.Nodes()
		if len(nodes) != 1 {
			return nil, dsec.Errorf(dsec.Invalid, "examine node", "", "there are %d nodes: name one", len(nodes))
		}
		node = dsec.NodeID(nodes[0].Id)
	}
	resp := &dsecv1.DoctorResponse{}
	return resp, s.cfg.Cluster.Call(ctx, node, wire.VerbDoctor, scope(ctx), req, resp)
}

// keys is the service of that name.
type keys struct{ *Gateway }

func keyMessage(k iam.Key) *dsecv1.Key {
	return &dsecv1.Key{Id: k.ID, Name: k.Name, Role: string(k.Role), Project: k.Project, Created: wire.Stamp(k.Created),
		Expires: wire.Stamp(k.Expires), Revoked: k.Revoked}
}

func (k *keys) Create(ctx context.Context, req *dsecv1.CreateKeyRequest) (*dsecv1.CreateKeyResponse, error) {
	if err := admin(ctx, "create key"); err != nil {
		return nil, err
	}
	key, secret, err := k.cfg.Keys.Create(ctx, iam.Request{Name: req.Name, Role: iam.Role(req.Role), Project: req.Project,
		Lifetime: wire.Duration(req.Lifetime)})
	if err != nil {
		return nil, err
	}
	k.log.Info("key created", "key", key.ID, "role", key.Role, "project", key.Project, "by", principal(ctx).Name)
	return &dsecv1.CreateKeyResponse{Key: keyMessage(key), Secret: secret}, nil
}

func (k *keys) List(ctx context.Context, _ *dsecv1.ListKeysRequest) (*dsecv1.ListKeysResponse, error) {
	if err := admin(ctx, "list keys"); err != nil {
		return nil, err
	}
	list, err := k.cfg.Keys.List(ctx)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.ListKeysResponse{}
	for _, key := range list {
		resp.Keys = append(resp.Keys, keyMessage(key))
	}
	return resp, nil
}

func (k *keys) Revoke(ctx context.Context, req *dsecv1.RevokeKeyRequest) (*dsecv1.RevokeKeyResponse, error) {
	if err := admin(ctx, "revoke key"); err != nil {
		return nil, err
	}
	existed, err := k.cfg.Keys.Revoke(ctx, req.Id)
	if err == nil && existed {
		k.log.Info("key revoked", "key", req.Id, "by", principal(ctx).Name)
	}
	return &dsecv1.RevokeKeyResponse{Existed: existed}, err
}
