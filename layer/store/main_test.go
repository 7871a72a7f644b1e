package store_test

import (
	"os"
	"testing"

	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
	"github.com/opendsec/dsec/layer/store"
)

// TestMain is outside of the package, which those who bring layers import.
func TestMain(m *testing.M) {
	store.EachWay, store.Device = ondemandtest.EachWay, ondemandtest.Device
	store.Child()
	os.Exit(ondemandtest.Main(m))
}
