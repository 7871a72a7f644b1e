package gateway_test

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/process"
)

// adminKey makes an admin's key.
func (e *env) adminKey() string {
	e.t.Helper()
	_, key, err := e.keys.Create(e.t.Context(), iam.Request{Role: iam.Admin})
	must(e.t, err)
	return key
}

// leaf is a field of a request, however deep.
type leaf []protoreflect.FieldDescriptor

func (l leaf) String() string {
	var names []string
	for _, f := range l {
		names = append(names, string(f.Name()))
	}
	return strings.Join(names, ".")
}

func (l leaf) last() protoreflect.FieldDescriptor { return l[len(l)-1] }

// leaves are the fields of a message and of those in it, but not within a time.
func leaves(m protoreflect.MessageDescriptor) (all []leaf) {
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		if f.Kind() != protoreflect.MessageKind || f.IsMap() {
			all = append(all, leaf{f})
			continue
		}
		if f.IsList() {
			all = append(all, leaf{f})
		}
		for _, l := range leaves(f.Message()) {
			all = append(all, append(leaf{f}, l...))
		}
	}
	return all
}

// reach returns the message that has the field, making those on the way.
func (l leaf) reach(m protoreflect.Message) protoreflect.Message {
	for _, f := range l[:len(l)-1] {
		if !f.IsList() {
			m = m.Mutable(f).Message()
			continue
		}
		list := m.Mutable(f).List()
		if list.Len() == 0 {
			list.Append(list.NewElement())
		}
		m = list.Get(0).Message()
	}
	return m
}

// usual is a request that names a sandbox and what is in it.
func usual(t *testing.T, d protoreflect.MessageDescriptor, sandbox string) protoreflect.Message {
	t.Helper()
	typ, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	must(t, err)
	m := typ.New()
	for _, l := range leaves(d) {
		f := l.last()
		values := map[protoreflect.Name]string{"id": sandbox, "sandbox": sandbox, "exec": "x1", "path": "/root/f", "from": "/root/f",
			"to": "/root/g", "source": "registry/base:1", "tag": "new:1", "ref": "base:1", "image": "base:1", "tier": "container"}
		v, ok := values[f.Name()]
		switch {
		case ok && f.Kind() == protoreflect.StringKind && !f.IsList():
			l.reach(m).Set(f, protoreflect.ValueOfString(v))
		case f.Name() == "argv":
			l.reach(m).Mutable(f).List().Append(protoreflect.ValueOfString("true"))
		}
	}
	return m
}

// rpc is a method with its request.
type rpc struct {
	endpoint
	in protoreflect.MessageDescriptor
}

func rpcs(t *testing.T) (all []rpc) {
	t.Helper()
	for _, p := range endpoints("s") {
		if !strings.HasPrefix(p.path, "/dsec.") {
			continue
		}
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(p.path[1:], "/", ".")))
		must(t, err)
		all = append(all, rpc{p, d.(protoreflect.MethodDescriptor).Input()})
	}
	return all
}

// try sends a request as an admin.
func (e *env) try(t *testing.T, p endpoint, key string, m proto.Message) dsec.Class {
	t.Helper()
	body, err := proto.Marshal(m) // JSON has no words for some of it
	must(t, err)
	kind := "application/proto"
	if p.stream {
		body, kind = enveloped(body), "application/connect+proto"
	}
	return e.answer(t, p, key, kind, body)
}

func extremes(f protoreflect.FieldDescriptor) []protoreflect.Value {
	switch f.Kind() {
	case protoreflect.Int64Kind:
		return []protoreflect.Value{protoreflect.ValueOfInt64(math.MinInt64), protoreflect.ValueOfInt64(-1), protoreflect.ValueOfInt64(math.MaxInt64)}
	case protoreflect.Int32Kind:
		return []protoreflect.Value{protoreflect.ValueOfInt32(math.MinInt32), protoreflect.ValueOfInt32(-1)}
	case protoreflect.Uint32Kind:
		return []protoreflect.Value{protoreflect.ValueOfUint32(math.MaxUint32)}
	case protoreflect.DoubleKind:
		var all []protoreflect.Value
		for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, -1e308, 1e308, math.MaxInt64} {
			all = append(all, protoreflect.ValueOfFloat64(x))
		}
		return all
	}
	return nil
}

func TestNumbersThatNobodyCanMeanAreInvalid(t *testing.T) {
	e := withNode(t)
	c := e.local()
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"cat"}, Stdin: true})
	must(t, err)
	key, tried := e.adminKey(), 0
	for _, r := range rpcs(t) {
		for _, l := range leaves(r.in) {
			if r.name == "Sandboxes/CreateMany" && len(l) > 1 {
				continue // an item fails by itself, as Create does
			}
			for _, v := range extremes(l.last()) {
				if l.last().FullName() == "google.protobuf.Timestamp.seconds" && v.Int() == -1 {
					continue // of 1969
				}
				m := usual(t, r.in, string(sb.ID))
				in := l.reach(m)
				if l.last().IsList() {
					in.Mutable(l.last()).List().Append(v)
				} else {
					in.Set(l.last(), v)
				}
				if f := m.Descriptor().Fields().ByName("exec"); f != nil && f.Kind() == protoreflect.StringKind {
					m.Set(f, protoreflect.ValueOfString(p.ID))
				}
				tried++
				if got := e.try(t, r.endpoint, key, m.Interface()); got != dsec.Invalid {
					t.Errorf("%s: %s of %v: class %q, want invalid", r.name, l, v, got)
				}
			}
		}
	}
	if tried < 100 {
		t.Errorf("only %d values were tried", tried)
	}
	must(t, p.Write(t.Context(), []byte("x"))) // from offset 0: what was refused is not believed
}

// spoil gives a string or list a value that it may not have.
func spoil(m protoreflect.Message, f protoreflect.FieldDescriptor, s string, n int) {
	switch {
	case f.IsMap():
		for i := range max(n, 1) {
			m.Mutable(f).Map().Set(protoreflect.ValueOfString(strconv.Itoa(i)).MapKey(), protoreflect.ValueOfString(s))
		}
	case f.IsList():
		list := m.Mutable(f).List()
		for range max(n, 1) {
			if f.Kind() == protoreflect.MessageKind {
				list.Append(list.NewElement())
			} else {
				list.Append(protoreflect.ValueOfString(s))
			}
		}
	case f.Kind() == protoreflect.BytesKind:
		m.Set(f, protoreflect.ValueOfBytes([]byte(s)))
	default:
		m.Set(f, protoreflect.ValueOfString(s))
	}
}

func TestEveryTextAndListOfARequestIsBounded(t *testing.T) {
	e := withNode(t)
	sb, key, tried := e.sandbox(e.local()), e.adminKey(), 0
	for _, r := range rpcs(t) {
		for _, l := range leaves(r.in) {
			f := l.last()
			text := f.Kind() == protoreflect.StringKind || f.IsMap() || f.Kind() == protoreflect.BytesKind
			if r.name == "Sandboxes/CreateMany" && len(l) > 1 || !text && !f.IsList() {
				continue
			}
			for _, x := range []struct {
				what string
				s    string
				n    int
			}{{"a NUL", "/a\x00b", 0}, {"3 MiB", "/" + strings.Repeat("x", 3<<20), 0}, {"many", "x", 20_000}} {
				switch {
				case x.what == "many" && !f.IsList() && !f.IsMap(),
					x.what != "many" && f.Kind() == protoreflect.MessageKind && !f.IsMap(),
					x.what == "a NUL" && f.Kind() == protoreflect.BytesKind,
					x.what == "many" && (f.Name() == "argv" || f.Name() == "command" || f.Name() == "env"): // by bytes
					continue
				}
				m := usual(t, r.in, string(sb.ID))
				spoil(l.reach(m), f, x.s, x.n)
				tried++
				if got := e.try(t, r.endpoint, key, m.Interface()); got != dsec.Invalid {
					t.Errorf("%s: %s of %s: class %q, want invalid", r.name, l, x.what, got)
				}
			}
		}
	}
	if tried < 200 {
		t.Errorf("only %d values were tried", tried)
	}
}

func TestTextsOfRawRequestsAreBounded(t *testing.T) {
	e := withNode(t)
	sb, key := e.sandbox(e.local()), e.adminKey()
	long := strings.Repeat("x", 5000)
	for _, x := range [][2]string{{http.MethodGet, "files?path=/a%00b"}, {http.MethodGet, "files?path=/" + long}, {http.MethodPut, "files?path=/f&user=r%00"},
		{http.MethodPut, "files?path=/f&user=" + long}, {http.MethodPut, "files?path=/f&sha256=" + long}, {http.MethodGet, "tree?path=/&glob=a%00"},
		{http.MethodPut, "tree?path=/" + long}, {http.MethodGet, "tree?path=/" + strings.Repeat("&glob=x", 2000)}} {
		p := endpoint{name: x[0], method: x[0], path: "/v1/sandboxes/" + string(sb.ID) + "/" + x[1]}
		if got := e.answer(t, p, key, "application/octet-stream", []byte("x")); got != dsec.Invalid {
			t.Errorf("%s %.60s: class %q, want invalid", x[0], x[1], got)
		}
	}
	for _, q := range []string{"tag=" + long, "at=/" + long, "owner=" + long, "call_id=" + long, "tag=a%00"} {
		p := endpoint{name: "upload", method: http.MethodPost, path: "/v1/layers/upload?kind=build&" + q}
		if got := e.answer(t, p, key, "application/x-tar", []byte("x")); got != dsec.Invalid {
			t.Errorf("upload %.60s: class %q, want invalid", q, got)
		}
	}
}

// TestLargeSandboxesHideNoOthers: all of them together are more than the answer
// of a node may be.
func TestLargeSandboxesHideNoOthers(t *testing.T) {
	e := withNode(t)
	c, ctx := e.local(), t.Context()
	large := spec
	large.Env = map[string]string{"A": strings.Repeat("x", 250<<10)}
	for range 3 {
		must(t, c.CreateMany(ctx, slices.Repeat([]dsec.Spec{large}, 100), "", func(r client.Created) error { return r.Err }))
	}
	small := spec
	small.Name, small.Env = "small", map[string]string{"A": "b"}
	sb, err := c.Create(ctx, small)
	must(t, err)
	list, unreachable, err := c.List(ctx, client.ListOptions{All: true})
	if err != nil || len(unreachable) != 0 || len(list) != 301 {
		t.Fatalf("%d listed, unreachable %v, %v", len(list), unreachable, err)
	}
	if list[0].ID != sb.ID || list[0].Spec.Env["A"] != "b" || len(list[1].Spec.Env) != 0 {
		t.Errorf("%+v", list[0].Spec)
	}
	if got, err := c.Get(ctx, list[1].ID); err != nil || len(got.Spec.Env["A"]) != 250<<10 {
		t.Errorf("the whole of one: %v", err)
	}
}

// TestABatchOfLargeSpecsIsRefused: spelled out it would fill the memory.
func TestABatchOfLargeSpecsIsRefused(t *testing.T) {
	e := withNode(t)
	m := &dsecv1.CreateManyRequest{Count: 10_000, Specs: []*dsecv1.Spec{{Image: "missing", Env: map[string]string{"A": strings.Repeat("x", 200<<10)}}}}
	p := endpoint{name: "Sandboxes/CreateMany", method: http.MethodPost, path: "/dsec.v1.Sandboxes/CreateMany", stream: true}
	if got := e.try(t, p, e.adminKey(), m); got != dsec.Invalid {
		t.Errorf("class %q, want invalid", got)
	}
}

func TestNumbersOfRawRequestsAreBounded(t *testing.T) {
	e := withNode(t)
	sb, key := e.sandbox(e.local()), e.adminKey()
	for path, method := range map[string]string{
		"files?path=/root/f&offset=-1": http.MethodGet, "files?path=/root/f&length=-2": http.MethodGet,
		"files?path=/root/f&offset=9223372036854775807": http.MethodGet, "tree?path=/root&max=-1": http.MethodGet,
		"files?path=/root/f&mode=77777": http.MethodPut, "files?path=/root/f&uid=4294967295": http.MethodPut,
		"files?path=/root/f&gid=-1": http.MethodPut, "tree?path=/root&uid=99999999999": http.MethodPut,
		"execs/x1/stdin?offset=-5": http.MethodPut, "execs/x1/stdin?offset=9223372036854775807": http.MethodPut,
	} {
		p := endpoint{name: path, method: method, path: "/v1/sandboxes/" + string(sb.ID) + "/" + path}
		if got := e.answer(t, p, key, "application/octet-stream", []byte("x")); got != dsec.Invalid {
			t.Errorf("%s %s: class %q, want invalid", method, path, got)
		}
	}
}

// TestSumsOfLimitsDoNotWrapAround: one that is as large as it may be leaves no
// room for the next.
func TestSumsOfLimitsDoNotWrapAround(t *testing.T) {
	e := withNode(t)
	c, ctx := e.local(), t.Context()
	for _, l := range []dsec.Limits{{Memory: dsec.MaxBytes}, {Disk: dsec.MaxBytes}} {
		s := spec
		s.Limits = l
		_, err := c.Create(ctx, s)
		wantClass(t, err, dsec.ResourceExhausted)
	}
	if list, _, err := c.List(ctx, client.ListOptions{}); err != nil || len(list) != 0 {
		t.Fatal(list, err)
	}
}
