package image_test

import (
	"os"
	"testing"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
)

// TestMain is outside of the package, which those who bring layers import.
func TestMain(m *testing.M) {
	image.EachWay, image.Device = ondemandtest.EachWay, ondemandtest.Device
	os.Exit(ondemandtest.Main(m))
}
