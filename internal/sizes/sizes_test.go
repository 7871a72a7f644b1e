package sizes

import "testing"

func TestText(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 30: "5.0 GiB", 200 << 20: "200 MiB", 1 << 60: "1048576 TiB"} {
		if got := Text(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
