package gateway

import "slices"

// RawPatterns are the routes that are no service.
func RawPatterns() []string {
	all := slices.Sorted(func(yield func(string) bool) {
		for p := range (&Gateway{}).raw() {
			if !yield(p) {
				return
			}
		}
	})
	return append(all, "GET /metrics")
}
