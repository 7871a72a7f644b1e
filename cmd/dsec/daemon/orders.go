package daemon

import (
	"encoding/json"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/supervise"
)

// ordersFD is the first descriptor of every child: what the supervisor decided.
const ordersFD = supervise.FirstFD

// orders are handed to children in memory: any uid can read what it is handed,
// and nobody else can; the configuration file may be root's alone.
type orders struct {
	Config config.Config
	NATS   string // loopback port of the embedded server
	Secret string // what passwords between the processes are derived from
}

const maxOrders = 1 << 20

func (s *settings) orders(natsPort string) (*os.File, error) {
	secret, err := s.secret()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(orders{Config: s.Config, NATS: natsPort, Secret: secret})
	if err != nil {
		return nil, dsec.E(dsec.Internal, "write orders", "", err)
	}
	f, err := linux.SealedFile("dsec-orders", text)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "write orders", "", err)
	}
	return f, nil
}

// takeOrders is the child's side. All children share the file's offset, so it
// reads at 0.
func takeOrders() (o orders, err error) {
	f := os.NewFile(ordersFD, "orders")
	defer f.Close()
	text := make([]byte, maxOrders)
	n, _ := f.ReadAt(text, 0) // io.EOF comes with what there is
	if err := json.Unmarshal(text[:n], &o); err != nil {
		return o, dsec.Errorf(dsec.Invalid, "read orders", "", "this verb is started by dsec up: %w", err)
	}
	return o, nil
}
