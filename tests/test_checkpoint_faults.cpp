#include "test_checkpoint_support.h"
