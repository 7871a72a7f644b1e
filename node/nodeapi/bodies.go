package nodeapi

import (
	"errors"
	"io"
	"net/http"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// movingBody is a request body that may be slow but not stand still.
type movingBody struct {
	io.Reader
	rc *http.ResponseController
}

func newMovingBody(w http.ResponseWriter, r *http.Request) *movingBody {
	return &movingBody{r.Body, http.NewResponseController(w)}
}

func (b *movingBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(stall)) // unsupported only in tests without a connection
	return b.Reader.Read(p)
}

// framed is the answer of a stream: nothing is sent before the first write, so
// that an early error is a proper HTTP error.
type framed struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	fw    *wire.FrameWriter
	begun bool
}

func newFramed(w http.ResponseWriter) *framed {
	f := &framed{w: w, rc: http.NewResponseController(w)}
	f.fw = wire.NewFrameWriter(w)
	return f
}

func (f *framed) begin() {
	f.begun = true
	_ = f.rc.SetWriteDeadline(time.Now().Add(stall))
}

func (f *framed) Write(p []byte) (int, error) {
	f.begin()
	return f.fw.Write(p)
}

func (f *framed) message(m proto.Message) error {
	f.begin()
	return f.fw.Message(m)
}

func (f *framed) alive() error {
	f.begin()
	if err := f.fw.Alive(); err != nil {
		return err
	}
	return f.rc.Flush()
}

// end finishes the answer; it returns err while nothing was sent.
func (f *framed) end(err error) error {
	if err != nil && !f.begun {
		return err
	}
	f.begin()
	_ = f.fw.End(err) // the reader sees a stream that broke off
	return nil
}

// bodyError: an upload whose sender went away is Canceled, whatever the file
// service makes of the broken body.
func bodyError(op, path string, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, http.ErrBodyReadAfterClose) {
		return dsec.E(dsec.Canceled, op, path, err)
	}
	return err
}

// request reads the message that opens a stream.
func request(w http.ResponseWriter, r *http.Request, m proto.Message) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err == nil {
		err = proto.Unmarshal(b, m)
	}
	if err != nil {
		return dsec.E(dsec.Invalid, "decode request", r.URL.Path, err)
	}
	return wire.Check(m)
}
