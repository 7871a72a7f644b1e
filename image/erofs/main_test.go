package erofs_test

import (
	"os"
	"testing"

	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
)

func TestMain(m *testing.M) { os.Exit(ondemandtest.Main(m)) }
