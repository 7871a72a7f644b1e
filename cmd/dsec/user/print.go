package user

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/sizes"
)

// asJSON reports whether -o json was given; anything but table and json is
// refused.
func asJSON(c *cobra.Command) (bool, error) {
	switch o, _ := c.Flags().GetString("output"); o {
	case "json":
		return true, nil
	case "table", "":
		return false, nil
	default:
		return false, dsec.Errorf(dsec.Invalid, "print output", dsec.Quote(o), "want table or json")
	}
}

// show prints v as JSON if asked for, else calls people.
func show(c *cobra.Command, v any, people func(w io.Writer) error) error {
	j, err := asJSON(c)
	if err != nil {
		return err
	}
	if j {
		return printJSON(c.OutOrStdout(), v)
	}
	return people(c.OutOrStdout())
}

// printJSON writes one value on one line, which is shown as it is by a terminal, too:
// what commands one, and JSON would let through, is escaped.
func printJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(plain(reflect.ValueOf(v))); err != nil {
		return err
	}
	_, err := io.WriteString(w, escaped(b.String()))
	return err
}

// escaped writes characters that can only be in strings of a JSON text as their numbers.
func escaped(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r != '\n' && commands(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	timeType     = reflect.TypeFor[time.Time]()
	rawType      = reflect.TypeFor[json.RawMessage]()
)

// plain turns a value into what JSON has, durations in seconds and bytes as
// text.
func plain(v reflect.Value) any {
	if !v.IsValid() {
		return nil
	}
	switch v.Type() {
	case durationType:
		return time.Duration(v.Int()).Seconds()
	case timeType, rawType:
		return v.Interface()
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		return plain(v.Elem())
	case reflect.Struct:
		out := map[string]any{}
		plainFields(v, out)
		return out
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return string(v.Bytes())
		}
		out := make([]any, v.Len())
		for i := range out {
			out[i] = plain(v.Index(i))
		}
		return out
	case reflect.Map:
		out := map[string]any{}
		for k, x := range v.Seq2() {
			out[fmt.Sprint(k.Interface())] = plain(x)
		}
		return out
	}
	return v.Interface()
}

// plainFields adds the exported fields of a struct under their JSON names.
func plainFields(v reflect.Value, out map[string]any) {
	for f, x := range v.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && x.Kind() == reflect.Struct:
			plainFields(x, out)
			continue
		case !f.IsExported() || name == "-" || strings.HasPrefix(options, "omit") && x.IsZero():
			continue
		case name == "":
			name = snake(f.Name)
		}
		out[name] = plain(x)
	}
}

// snake turns MemoryPeak into memory_peak and OOMKills into oom_kills.
func snake(s string) string {
	var b strings.Builder
	upper := func(i int) bool { return i >= 0 && i < len(s) && s[i] >= 'A' && s[i] <= 'Z' }
	for i := range len(s) {
		if upper(i) && i > 0 && (!upper(i-1) || i+1 < len(s) && !upper(i+1)) {
			b.WriteByte('_')
		}
		b.WriteByte(s[i])
	}
	return strings.ToLower(b.String())
}

// table prints rows below a head, columns aligned. Control characters of what
// comes from inside sandboxes do not reach the terminal.
func table(w io.Writer, head string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(head, " ", "\t"))
	for _, r := range rows {
		for i := range r {
			if r[i] = safe(r[i]); r[i] == "" {
				r[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	return t.Flush()
}

// safe replaces what a terminal would do instead of show.
func safe(s string) string {
	return strings.Map(func(r rune) rune {
		if commands(r) {
			return '?'
		}
		return r
	}, s)
}

// commands says that a character commands a terminal: C0 and C1 controls, and those
// that have a line read in another order than it is.
func commands(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) }

// ErrorText is an error for a terminal: names of files and of much else in it come
// from inside sandboxes.
func ErrorText(err error) string {
	lines := strings.Split(err.Error(), "\n")
	for i := range lines {
		lines[i] = safe(lines[i])
	}
	return strings.Join(lines, "\n")
}

// size for people: "1.5 GiB".
func size(n int64) string { return sizes.Text(n) }

// span for people: "3m", "2h", "5d".
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return span(time.Since(t)) + " ago"
}
