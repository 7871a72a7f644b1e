package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

func rules(all []dsec.NetworkRule) (out []*dsecv1.NetworkRule) {
	for _, r := range all {
		out = append(out, &dsecv1.NetworkRule{Domain: r.Domain, Cidr: r.CIDR, Protocol: r.Protocol, Ports: r.Ports, Mirror: r.Mirror})
	}
	return out
}

func rulesFrom(all []*dsecv1.NetworkRule) (out []dsec.NetworkRule) {
	for _, r := range all {
		out = append(out, dsec.NetworkRule{Domain: r.GetDomain(), CIDR: r.GetCidr(), Protocol: r.GetProtocol(), Ports: r.GetPorts(), Mirror: r.GetMirror()})
	}
	return out
}

// SetNetwork is the request for a policy.
func SetNetwork(id dsec.SandboxID, p dsec.NetworkPolicy, callID string) *dsecv1.SetNetworkRequest {
	return &dsecv1.SetNetworkRequest{Id: string(id), Network: string(p.Mode), Allow: rules(p.Allow), CallId: callID}
}

// PolicyFrom a request.
func PolicyFrom(p *dsecv1.SetNetworkRequest) dsec.NetworkPolicy {
	return dsec.NetworkPolicy{Mode: dsec.NetworkMode(p.GetNetwork()), Allow: rulesFrom(p.GetAllow())}
}

// Network for the wire; nil stays nil.
func Network(n *dsec.NetworkState) *dsecv1.Network {
	if n == nil {
		return nil
	}
	return &dsecv1.Network{Mode: string(n.Mode), Allow: rules(n.Allow), Generation: n.Generation}
}

// NetworkFrom the wire; nil stays nil.
func NetworkFrom(p *dsecv1.Network) *dsec.NetworkState {
	if p == nil {
		return nil
	}
	return &dsec.NetworkState{NetworkPolicy: dsec.NetworkPolicy{Mode: dsec.NetworkMode(p.GetMode()), Allow: rulesFrom(p.GetAllow())}, Generation: p.GetGeneration()}
}

// Egress for the wire.
func Egress(e dsec.Egress) *dsecv1.EgressResponse {
	p := &dsecv1.EgressResponse{PacketsOut: e.PacketsOut, BytesOut: e.BytesOut, PacketsIn: e.PacketsIn, PacketsRefused: e.PacketsRefused}
	for _, r := range e.Rows {
		p.Rows = append(p.Rows, &dsecv1.EgressRow{Name: r.Name, Address: r.Address, Port: uint32(r.Port), Refused: r.Refused,
			Connections: r.Connections, BytesOut: r.BytesOut, BytesIn: r.BytesIn, Last: Stamp(r.Last)})
	}
	return p
}

// EgressFrom the wire.
func EgressFrom(p *dsecv1.EgressResponse) dsec.Egress {
	e := dsec.Egress{Rows: []dsec.EgressRow{}, PacketsOut: p.GetPacketsOut(), BytesOut: p.GetBytesOut(), PacketsIn: p.GetPacketsIn(), PacketsRefused: p.GetPacketsRefused()}
	for _, r := range p.GetRows() {
		e.Rows = append(e.Rows, dsec.EgressRow{Name: r.GetName(), Address: r.GetAddress(), Port: uint16(r.GetPort()), Refused: r.GetRefused(),
			Connections: r.GetConnections(), BytesOut: r.GetBytesOut(), BytesIn: r.GetBytesIn(), Last: instant(r.GetLast())})
	}
	return e
}
