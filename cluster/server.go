package cluster

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// ServerConfig of the embedded NATS server.
type ServerConfig struct {
	Dir    string // JetStream's; made if missing
	Listen string // loopback address for node agents, "127.0.0.1:0" picks a port
	Secret string // what the passwords of gateway and nodes are derived from
	Log    *slog.Logger
}

// Server is a NATS server inside this process. Every JetStream write is
// synced before it is acknowledged.
type Server struct {
	ns     *server.Server
	secret string
}

const (
	gatewayUser = "gateway"
	nodePrefix  = "node-"
	serverStart = 10 * time.Second
	// How long a node may take to answer one request.
	answerWithin = 30 * time.Minute
)

// NodeUser and NodePassword are the credentials of a node's agent.
func NodeUser(id dsec.NodeID) string { return nodePrefix + string(id) }

// NodePassword derives a node's password; it tells nothing about another's.
func NodePassword(secret string, id dsec.NodeID) string { return derive(secret, NodeUser(id)) }

// Password of a user of the server, such as "gateway".
func Password(secret, user string) string { return derive(secret, user) }

func derive(secret, user string) string {
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte("nats user " + user))
	return hex.EncodeToString(m.Sum(nil))
}

// StartServer returns a server that accepts connections.
func StartServer(cfg ServerConfig) (*Server, error) {
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "start nats server", cfg.Listen, err)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return nil, dsec.Errorf(dsec.Invalid, "start nats server", cfg.Listen, "the embedded server listens on loopback addresses only")
	}
	if len(cfg.Secret) < 16 {
		return nil, dsec.Errorf(dsec.Invalid, "start nats server", cfg.Listen, "secret has %d bytes, want at least 16", len(cfg.Secret))
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "start nats server", cfg.Listen, err)
	}
	if n == 0 {
		n = server.RANDOM_PORT
	}
	opts := &server.Options{
		ServerName: "dsec", Host: host, Port: n, NoSigs: true, DisableJetStreamBanner: true,
		JetStream: true, StoreDir: cfg.Dir, SyncAlways: true, NoSystemAccount: true,
		CustomClientAuthentication: &authenticator{secret: cfg.Secret},
	}
	ns, err := server.NewServer(opts)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "start nats server", cfg.Dir, err)
	}
	ns.SetLoggerV2(&logger{cfg.Log}, false, false, false)
	go ns.Start()
	if !ns.ReadyForConnections(serverStart) {
		ns.Shutdown()
		return nil, dsec.Errorf(dsec.Unavailable, "start nats server", cfg.Dir, "not ready after %v", serverStart)
	}
	return &Server{ns: ns, secret: cfg.Secret}, nil
}

// URL for node agents on this machine.
func (s *Server) URL() string { return s.ns.ClientURL() }

// Close stops the server; what it acknowledged is on disk.
func (s *Server) Close() error {
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
	return nil
}

// authenticator knows gateway and nodes by passwords derived from one secret,
// and gives each node the rights on its own subjects only.
type authenticator struct{ secret string }

func (a *authenticator) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	want := derive(a.secret, o.Username)
	if subtle.ConstantTimeCompare([]byte(want), []byte(o.Password)) != 1 {
		return false
	}
	if o.Username == gatewayUser {
		c.RegisterUser(&server.User{Username: gatewayUser})
		return true
	}
	id, err := dsec.ParseNodeID(strings.TrimPrefix(o.Username, nodePrefix))
	if err != nil || !strings.HasPrefix(o.Username, nodePrefix) {
		return false
	}
	c.RegisterUser(&server.User{Username: o.Username, Permissions: NodePermissions(id)})
	return true
}

// NodePermissions is what a node may publish and subscribe; an external
// cluster is configured with the same.
func NodePermissions(id dsec.NodeID) *server.Permissions {
	var publish []string
	for _, bucket := range []string{wire.BucketHeartbeats, wire.BucketNodes} {
		key := "$KV." + bucket + "." + string(id)
		publish = append(publish, key, "$JS.API.STREAM.INFO.KV_"+bucket, "$JS.API.DIRECT.GET.KV_"+bucket+"."+key)
	}
	return &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: publish},
		Subscribe: &server.SubjectPermission{Allow: []string{wire.Subject(id, ">"), wire.Inbox(id) + ".>"}},
		Response:  &server.ResponsePermission{MaxMsgs: 1, Expires: answerWithin},
	}
}

// logger hands the server's warnings and errors to slog.
type logger struct{ log *slog.Logger }

func (l *logger) Noticef(string, ...any)        {}
func (l *logger) Debugf(string, ...any)         {}
func (l *logger) Tracef(string, ...any)         {}
func (l *logger) Warnf(format string, a ...any) { l.log.Warn("nats", "text", sprintf(format, a)) }
func (l *logger) Errorf(format string, a ...any) {
	l.log.Error("nats", "text", sprintf(format, a))
}
func (l *logger) Fatalf(format string, a ...any) {
	l.log.Error("nats", "text", sprintf(format, a))
}

var errClosed = errors.New("cluster closed")
