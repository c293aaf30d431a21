"""By hand: python -m pytest -s tests/parallel_sweep.py. Every dimension alone, in pairs and in triples, on up to 8
ranks; each mesh goes on from the checkpoint of the one before it."""
import pytest
from test_parallel import chain, launch  # noqa: F401
from test_parallel import test_train_goes_on_from_a_mesh as train_goes_on

MESHES = [
    'tp2', 'cp2', 'pp2', 'pp2i', 'fsdp2', 'hsdp2', 'tp4', 'cp4', 'pp4', 'fsdp4', 'hsdp2 fsdp2',
    'tp2 cp2', 'tp2 pp2', 'tp2 pp2i', 'tp2 fsdp2', 'tp2 hsdp2', 'cp2 pp2', 'cp2 fsdp2', 'cp2 hsdp2', 'pp2 fsdp2',
    'pp2i fsdp2', 'pp2 hsdp2',
    'tp2 cp2 pp2', 'tp2 pp2 fsdp2', 'tp2 cp2 fsdp2', 'cp2 pp2 fsdp2', 'tp2 fsdp2 hsdp2', 'tp2 cp2 pp2i']


@pytest.mark.parametrize('mesh', MESHES)
def test_every_mesh_trains_as_plain(chain, mesh):  # noqa: F811
    chain(mesh)


def test_train_goes_on_from_the_last_mesh(chain, launch):  # noqa: F811
    train_goes_on(chain, launch)
