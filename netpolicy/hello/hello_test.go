package hello

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"testing"

	"golang.org/x/crypto/cryptobyte"
)

// said is what crypto/tls sends first.
func said(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer func() { _ = far.Close() }()
	go func() {
		c.InsecureSkipVerify = true
		_ = tls.Client(near, c).Handshake()
	}()
	b := make([]byte, Max)
	n, err := far.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

func TestNamesThatClientsSay(t *testing.T) {
	for name, want := range map[string]string{"good.example": "good.example", "GOOD.Example": "good.example", "good.example.": "good.example",
		"xn--bcher-kva.example": "xn--bcher-kva.example", "_x.good.example": "_x.good.example"} {
		for _, most := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			if got, err := Name(said(t, &tls.Config{ServerName: name, MaxVersion: most})); got != want || err != nil {
				t.Errorf("%q: %q, %v", name, got, err)
			}
		}
	}
	if got, err := Name(said(t, &tls.Config{ServerName: "192.0.2.1"})); !errors.Is(err, ErrNoName) {
		t.Errorf("an address: %q, %v", got, err)
	}
}

// TestAHelloInParts: of any size, in one record or in many.
func TestAHelloInParts(t *testing.T) {
	b := said(t, &tls.Config{ServerName: "good.example"})
	for _, whole := range [][]byte{b, split(b, 1), split(b, 7), split(b, 100)} {
		for n := range whole {
			if got, err := Name(whole[:n]); !errors.Is(err, ErrShort) {
				t.Fatalf("%d bytes of %d: %q, %v", n, len(whole), got, err)
			}
		}
		if got, err := Name(append(bytes.Clone(whole), 23, 3, 3, 0, 1, 0)); got != "good.example" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// split puts a hello into records of so many bytes.
func split(b []byte, size int) (out []byte) {
	for message := b[headerOfRecord:]; len(message) > 0; {
		n := min(size, len(message))
		out = append(out, recordHandshake, 3, 1, byte(n>>8), byte(n))
		out = append(out, message[:n]...)
		message = message[n:]
	}
	return out
}

func TestECHIsSeen(t *testing.T) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	list := echList(key.PublicKey().Bytes(), "public.example")
	got, err := Name(said(t, &tls.Config{ServerName: "hidden.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: list}))
	if !errors.Is(err, ErrEncrypted) || got != "public.example" {
		t.Errorf("%q, %v", got, err)
	}
}

// echList is a list of one configuration, as a record of DNS has it.
func echList(public []byte, name string) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint16(extECH)
		b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint8(1)     // id
			b.AddUint16(0x20) // X25519
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(public) })
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint16(1); b.AddUint16(1) })
			b.AddUint8(32) // longest name
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(name)) })
			b.AddUint16(0)
		})
	})
	return b.BytesOrPanic()
}

// made is a hello with these extensions, in one record.
func made(extensions ...[]byte) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddBytes([]byte{recordHandshake, 3, 1})
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint8(clientHello)
		b.AddUint24LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint16(0x303)
			b.AddBytes(make([]byte, 32))
			b.AddUint8(0)
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint16(0x1301) })
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint8(0) })
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
				for _, e := range extensions {
					b.AddBytes(e)
				}
			})
		})
	})
	return b.BytesOrPanic()
}

func extension(kind uint16, body []byte) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddUint16(kind)
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(body) })
	return b.BytesOrPanic()
}

func names(all ...string) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		for _, n := range all {
			b.AddUint8(typeHostName)
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(n)) })
		}
	})
	return extension(extServerName, b.BytesOrPanic())
}

func TestWhatIsRefused(t *testing.T) {
	good := names("good.example")
	grease := extension(0x0a0a, nil)
	long := split(made(names("good.example"), extension(21, make([]byte, Max))), 4096)
	for what, c := range map[string]struct {
		b    []byte
		want error
	}{
		"good":              {made(grease, good, extension(0xfafa, []byte{0})), nil},
		"no extension":      {made(), ErrNoName},
		"two names":         {made(names("good.example", "bad.example")), ErrMalformed},
		"two extensions":    {made(good, names("bad.example")), ErrMalformed},
		"a name with a NUL": {made(names("good.example\x00.bad.example")), ErrMalformed},
		"an empty name":     {made(names("")), ErrMalformed},
		"two dots":          {made(names("good..example")), ErrMalformed},
		"another alphabet":  {made(names("bücher.example")), ErrMalformed},
		"a long name":       {made(names(strings.Repeat("a.", 130) + "b")), ErrMalformed},
		"more than a list":  {made(extension(extServerName, append(good[4:], 0))), ErrMalformed},
		"ECH":               {made(good, extension(extECH, []byte{0, 0, 1})), ErrEncrypted},
		"encrypted SNI":     {made(extension(extEncryptedSNI, nil)), ErrEncrypted},
		"too long":          {long, ErrSize},
		"HTTP":              {[]byte("GET / HTTP/1.1\r\n"), ErrNotTLS},
		"SSH":               {[]byte("SSH-2.0-OpenSSH_9.2"), ErrNotTLS},
		"SSL 2":             {[]byte{0x80, 0x2e, 1, 3, 1}, ErrNotTLS},
		"another message":   {[]byte{recordHandshake, 3, 1, 0, 4, 2, 0, 0, 0}, ErrMalformed},
		"an empty record":   {[]byte{recordHandshake, 3, 1, 0, 0}, ErrMalformed},
		"a number":          {[]byte{recordHandshake, 9}, ErrNotTLS},
	} {
		if got, err := Name(c.b); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
}

// FuzzName: what is read is a name as servers read it, and more bytes never change
// what was said.
func FuzzName(f *testing.F) {
	f.Add(said(f, &tls.Config{ServerName: "good.example"}))
	f.Add(made(names("good.example"), extension(extECH, nil)))
	f.Add(split(made(names("good.example")), 3))
	f.Fuzz(func(t *testing.T, b []byte) {
		name, err := Name(b)
		if again, err2 := Name(append(bytes.Clone(b), 0)); !errors.Is(err, ErrShort) && (name != again || !errors.Is(err2, err)) {
			t.Fatalf("%q, %v with another byte, %q, %v before", again, err2, name, err)
		}
		if err != nil {
			return
		}
		if name != strings.ToLower(name) || strings.ContainsAny(name, "\x00/ :") || strings.HasSuffix(name, ".") || !bytes.Contains(bytes.ToLower(b), []byte(name[:1])) {
			t.Fatalf("%q", name)
		}
	})
}
